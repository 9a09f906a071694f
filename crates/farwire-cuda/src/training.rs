//! What training does to vectors on a card, besides exchanging them.

use std::sync::Arc;

use crate::driver::{Buffer, Device, DeviceTensor, DeviceValues};
use crate::error::DeviceError;
use crate::kernels::{AdamWStep, TrainingKernels};

/// Sums of gradients, their norm and AdamW, on the card. All vectors are f32.
///
/// All work is put on the device's stream, in order. It first waits for the tensor's own stream,
/// which waits for it afterwards.
#[derive(Debug)]
pub struct Training {
    device: Arc<Device>,
    kernels: TrainingKernels,
}

impl Training {
    /// Compiles the kernels, if that has not been done yet.
    pub fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Self { device: device.clone(), kernels: TrainingKernels::new(device)? })
    }

    /// The card.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Adds a gradient to the elements of `sum` from `at` on. Records in `found`, at `place`, the
    /// first of these elements that is not finite afterwards. If `fresh`, it adds to zeros and
    /// forgets what was found before.
    ///
    /// # Panics
    ///
    /// If `sum` or `found` is too short, or a vector is not f32.
    pub fn add(
        &self,
        sum: impl Into<DeviceTensor>,
        at: usize,
        fresh: bool,
        gradient: &DeviceTensor,
        (found, place): (&mut NotFiniteElements, usize),
    ) -> Result<(), DeviceError> {
        let mut sum = sum.into();
        self.device.follow(sum.stream())?;
        self.device.follow(gradient.stream())?;
        if fresh {
            found.0.fill_bytes(place..place + 1, 0xff)?;
        }
        self.kernels.add(&mut sum, at, fresh, gradient, &mut found.0, place)?;
        self.device.lead(gradient.stream())?;
        self.device.lead(sum.stream())
    }

    /// The sum of squares of each vector, in f64: the same bits for the same values, on any card.
    /// A sum is not finite if a value is not. Waits for the sums.
    ///
    /// # Panics
    ///
    /// If a vector is not f32.
    pub fn squares(&self, vectors: &[DeviceValues<'_>]) -> Result<Vec<f64>, DeviceError> {
        let counts: Vec<usize> =
            vectors.iter().map(|values| TrainingKernels::sums(values.len())).collect();
        let total = counts.iter().sum();
        let mut sums = self.device.pooled::<f64>(total)?;
        let mut at = 0;
        for (values, count) in vectors.iter().zip(&counts) {
            self.kernels.squares(*values, &mut sums, at)?;
            at += count;
        }
        let sums = sums.download_front(total)?;
        let mut rest = &sums[..];
        Ok(counts
            .iter()
            .map(|count| {
                let (these, after) = rest.split_at(*count);
                rest = after;
                these.iter().sum()
            })
            .collect())
    }

    /// Updates weights by AdamW, with the same bits as this formula on a CPU:
    ///
    /// ```text
    /// g = scale · gradient
    /// first  = beta1 · first  + (1 − beta1) · g
    /// second = beta2 · second + (1 − beta2) · g²
    /// weights = decay · weights − step · first / (√second / root + epsilon)
    /// ```
    ///
    /// # Panics
    ///
    /// If lengths differ, or a vector is not f32.
    pub fn adamw(
        &self,
        weights: impl Into<DeviceTensor>,
        (first, second): (&mut Buffer<f32>, &mut Buffer<f32>),
        gradient: DeviceValues<'_>,
        step: &AdamWStep,
    ) -> Result<(), DeviceError> {
        let mut weights = weights.into();
        self.device.follow(weights.stream())?;
        self.kernels.adamw(&mut weights, first, second, gradient, step)?;
        self.device.lead(weights.stream())
    }
}

/// For each of several vectors, the first element that is not finite.
#[derive(Debug)]
pub struct NotFiniteElements(Buffer<u64>);

impl NotFiniteElements {
    /// Space for this many vectors, with nothing found yet.
    pub fn new(device: &Arc<Device>, vectors: usize) -> Result<Self, DeviceError> {
        let mut found = device.buffer(vectors)?;
        found.fill_bytes(0..vectors, 0xff)?;
        Ok(Self(found))
    }

    /// For each vector, the index and value of that element, a NaN or an infinity. Waits for them.
    pub fn fetch(&self) -> Result<Vec<Option<(u64, f32)>>, DeviceError> {
        const KINDS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let found = |word: u64| (word != u64::MAX).then(|| (word / 4, KINDS[(word % 4) as usize]));
        Ok(self.0.download()?.into_iter().map(found).collect())
    }
}
