//! What training does to vectors on a card, beside exchanging them.

use std::sync::Arc;

use crate::driver::{Buffer, Device, DeviceTensor, DeviceValues};
use crate::error::DeviceError;
use crate::kernels::{AdamWStep, TrainingKernels};

/// Sums of gradients, their norm and AdamW, where the vectors are. All vectors are of f32.
///
/// Everything is put on the device's stream, in order. A tensor's own stream is waited for before,
/// and waits afterwards.
#[derive(Debug)]
pub struct Training {
    device: Arc<Device>,
    kernels: TrainingKernels,
}

impl Training {
    /// Compiles its kernels, if that has not been done yet.
    pub fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Self { device: device.clone(), kernels: TrainingKernels::new(device)? })
    }

    /// The card.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Adds a gradient to the elements of `sum` from `at` on. Notes in `found`, at `place`, which
    /// element is then the first that is not finite. If `fresh`, it adds to zeros, and nothing was
    /// found so far.
    ///
    /// # Panics
    ///
    /// If `sum` or `found` is too short, or something is not f32.
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

    /// The sum of squares of each of these, in f64: the same bits for the same values, on any card.
    /// Not finite where a value is not. Waits for it.
    ///
    /// # Panics
    ///
    /// If something is not f32.
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

    /// Moves weights by AdamW, with the bits of the same formula on a CPU:
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
    /// If lengths differ, or something is not f32.
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

/// For each of several vectors, which element was first found to be not finite.
#[derive(Debug)]
pub struct NotFiniteElements(Buffer<u64>);

impl NotFiniteElements {
    /// None found, for so many vectors.
    pub fn new(device: &Arc<Device>, vectors: usize) -> Result<Self, DeviceError> {
        let mut found = device.buffer(vectors)?;
        found.fill_bytes(0..vectors, 0xff)?;
        Ok(Self(found))
    }

    /// By vector: the element's index and value, a NaN or an infinity. Waits for them.
    pub fn fetch(&self) -> Result<Vec<Option<(u64, f32)>>, DeviceError> {
        const KINDS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let found = |word: u64| (word != u64::MAX).then(|| (word / 4, KINDS[(word % 4) as usize]));
        Ok(self.0.download()?.into_iter().map(found).collect())
    }
}
