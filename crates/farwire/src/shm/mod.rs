//! Frames through shared memory, between threads or between processes of one host.
//!
//! A [`Region`](region::Region) is memory that both ends have mapped. [Slots](slots) in it change
//! hands between the two. A [ring] passes frames one way, in slots that the receiver reads in
//! place. A [`Bell`](bell::Bell) wakes whoever sleeps for lack of frames. All `unsafe` code of
//! this module is in `region` and `slots`.

pub(crate) mod bell;
mod files;
pub(crate) mod kind;
pub(crate) mod link;
#[cfg(test)]
mod model;
pub(crate) mod region;
pub(crate) mod ring;
mod same_host;
pub(crate) mod slots;
