//! Frames over QUIC, between hosts.
//!
//! Each lane has [streams of its own](link), so lanes do not hold each other up, and a lane whose
//! frames nobody wants yet is held back by flow control. A *control stream* per peer carries
//! [heartbeats](control) and the goodbye.

pub(crate) mod batches;
pub(crate) mod congestion;
pub(crate) mod control;
pub(crate) mod kind;
pub(crate) mod link;
pub(crate) mod transport;
