//! Frames over TCP, between hosts: for clean and fast networks, and for those that block UDP.
//!
//! Connections are [TLS 1.3](tls) with the certificates of [`Identity`](crate::join::identity), to
//! a [port] of the same number as the process's UDP port. Each carries data one way only, so
//! what one direction has to say of its windows never waits behind the data of the other. All lanes
//! share them; a [link] has windows for each lane, so that none holds up another.

mod info;
pub(crate) mod kind;
pub(crate) mod lifeline;
pub(crate) mod link;
pub(crate) mod port;
mod tls;
mod workers;
