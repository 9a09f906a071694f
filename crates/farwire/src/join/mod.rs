//! How processes find each other and prove who they are.

pub(crate) mod again;
pub(crate) mod beginning;
mod calling;
pub(crate) mod door;
pub(crate) mod env;
pub(crate) mod gathering;
pub(crate) mod held_port;
pub(crate) mod identity;
pub(crate) mod job;
mod meeting;
mod refusals;
pub(crate) mod rendezvous;
pub(crate) mod running;
pub(crate) mod tunnel;
