//! Barrier: every pair of ranks exchanges an empty frame.
//!
//! Every collective does at least that; the barrier does nothing else. Bytes sent per rank: N−1
//! headers. Rounds: 1.

use crate::ids::Rank;
use crate::schedule::{Incoming, Outcome, Outgoing, Schedule};

#[derive(Clone, Debug)]
pub(crate) struct Barrier;

impl Schedule for Barrier {
    fn input_len(&self) -> usize {
        0
    }

    fn output_len(&self) -> usize {
        0
    }

    fn outcome(&self) -> Outcome {
        Outcome::Nothing
    }

    fn sends(&self, _to: Rank) -> usize {
        1
    }

    fn send(&self, _to: Rank, _i: usize) -> Outgoing {
        Outgoing::HELLO
    }

    fn recvs(&self, _from: Rank) -> usize {
        1
    }

    fn recv(&self, _from: Rank, _i: usize) -> Incoming {
        Incoming::HELLO
    }
}
