//! Bad networks on one machine.
//!
//! A network is described once, as [`Impairments`]: rate, delay, jitter, queue, loss, reordering,
//! duplication, outages, an MTU that nobody announces. One [`Shaper`] per direction turns that
//! description into what leaves when. It does no IO and knows no clock, so it is tested in virtual
//! time. Two carriers put it under programs:
//!
//! - [`Lab`]: hosts as network namespaces, joined by a relay in user space. Any program runs on
//!   them, unchanged. Needs root on Linux; if it does not work, [`Lab::new`] says why.
//! - [`MemoryNetwork`]: sockets for quinn inside one process. Needs nothing. With tokio's paused
//!   clock a transfer of minutes runs in the time it takes to compute it.

#![deny(unsafe_code)]

mod firewall;
mod impair;
mod lab;
mod memory;
mod shaper;
mod tun;
pub mod units;

pub use impair::{Cut, Impairments, Loss, Outage, Partition, Queue};
pub use lab::{DEVICE, Lab, LabError, Relayed};
pub use memory::{MemoryNetwork, MemorySocket};
pub use shaper::{Shaper, Tally};
