//! The cards that gradients are on.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use farwire_cuda::{Device, DeviceError, DeviceTools};

/// Cards by number, with their kernels and the memory that operations work in. They are opened when
/// the first gradient comes, and hold no communicator.
#[derive(Debug, Default)]
pub(crate) struct Cards(Mutex<BTreeMap<usize, DeviceTools>>);

impl Cards {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, DeviceTools>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One card, or an error that says why it cannot be used.
    pub(crate) fn tools(&self, ordinal: usize) -> Result<DeviceTools, DeviceError> {
        let mut cards = self.lock();
        if let Some(tools) = cards.get(&ordinal) {
            return Ok(tools.clone());
        }
        let tools = DeviceTools::new(&Device::new(ordinal)?);
        cards.insert(ordinal, tools.clone());
        Ok(tools)
    }

    /// Bytes that have crossed the bus: to the host, and to the card.
    pub(crate) fn bus(&self) -> (u64, u64) {
        let cards = self.lock();
        let bus = cards.values().map(|tools| tools.device().bus());
        bus.fold((0, 0), |sum, bus| (sum.0 + bus.to_host, sum.1 + bus.to_card))
    }
}
