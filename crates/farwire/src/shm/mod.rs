//! Frames through shared memory, between threads or between processes of one host.
//!
//! A [`Region`](region::Region) is memory that both ends have mapped. A [ring] in it passes frames one way, in slots that the receiver reads in
//! place. A [`Bell`](bell::Bell) in it wakes whoever sleeps for lack of frames. All `unsafe` code is in `region`.

pub(crate) mod bell;
pub(crate) mod link;
pub(crate) mod region;
pub(crate) mod ring;
