//! A coded collective as a [`Machine`](farwire_proto::Machine) sees it.

use bytes::Bytes;
use farwire_proto::{Nonsense, Rounds};

use super::CodedCollective;

impl Rounds for CodedCollective {
    fn next_parcels(&mut self) -> Option<Vec<Bytes>> {
        self.next_parcels()
    }

    fn made(&self) -> u32 {
        self.made()
    }

    fn came(&mut self, round: u32, parcels: &[Vec<u8>]) -> Result<(), Nonsense> {
        let nonsense =
            |super::Nonsense { from, round, why }| Nonsense { from, round, why: why.into() };
        self.came(round, parcels).map_err(nonsense)
    }

    fn is_finished(&self) -> bool {
        self.is_finished()
    }
}
