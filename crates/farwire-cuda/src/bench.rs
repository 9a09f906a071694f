//! How long codecs take on the card, compared with a pass of `r += g` over the same memory in the
//! same run.
//!
//! Times are medians, by the card's own clock (events) unless a field says otherwise. Each round
//! takes all measurements one after another. Before each measurement by the card's clock, the card
//! gets a pass that is not measured. While that pass runs, the work to be measured is put on the
//! stream, so that the times show the card and not the host.

use std::sync::Arc;
use std::time::Instant;

use farwire_codec::{CodecSpec, CodedPlace, Context, Role, Shape};

use crate::codec::{DeviceCodec, DeviceEncoded, DeviceJob, DeviceResidual, Inbox};
use crate::driver::{Buffer, Device, Pinned, Timer, ValueType};
use crate::error::DeviceError;
use crate::kernels::{AddKernel, Matrix, PowerKernels};

/// The measurements of a codec. Times are in milliseconds.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The codec.
    pub codec: String,
    /// Number of elements in the vector.
    pub elements: usize,
    /// Bytes in its message.
    pub bytes: usize,
    /// `r += g`.
    pub add_ms: f64,
    /// Encode with error feedback; messages stay on the card.
    pub encode_ms: f64,
    /// Decode and add a message that is already on the card.
    pub decode_ms: f64,
    /// Encode, with the messages copied to pinned memory, by the host's clock.
    pub to_host_ms: f64,
    /// Decode and add a message from pinned memory, by the host's clock.
    pub from_host_ms: f64,
}

/// A gradient and a residual to measure with.
#[derive(Debug)]
pub struct Bench {
    device: Arc<Device>,
    timer: Timer,
    add: AddKernel,
    gradient: Buffer<f32>,
    owed: Buffer<f32>,
    acc: Buffer<f32>,
}

impl Bench {
    /// Vectors of `elements`, normally distributed or nearly so.
    pub fn new(device: &Arc<Device>, elements: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            device: device.clone(),
            timer: Timer::new(device)?,
            add: AddKernel::new(device)?,
            gradient: device.upload(&gaussian(elements, 1))?,
            owed: device.upload(&gaussian(elements, 2))?,
            acc: device.zeros(elements)?,
        })
    }

    /// Measures the codecs in turn, `repeats` times each.
    pub fn measure(
        &mut self,
        codecs: &[CodecSpec],
        repeats: usize,
    ) -> Result<Vec<Measured>, DeviceError> {
        let elements = self.gradient.len();
        let context = Context { seed: 1, step: 2, tensor: 3 };
        let place = CodedPlace::whole(context, elements);
        let mut sides = Vec::new();
        for spec in codecs {
            let codec = DeviceCodec::new(&self.device, spec)?;
            let out = DeviceEncoded::new(&self.device)?;
            sides.push((codec, out, Inbox::new(&self.device)?));
        }
        let mut times = vec![[const { Vec::new() }; 5]; codecs.len()];
        let Self { timer, add, gradient, owed, acc, device } = self;
        for round in 0..=repeats {
            for ((codec, out, inbox), times) in sides.iter_mut().zip(&mut times) {
                let job = DeviceJob {
                    values: gradient.values(),
                    residual: DeviceResidual::Owed(owed),
                    place: place.clone(),
                    role: Role::Worker,
                    rank: 0,
                    shards: std::slice::from_ref(&place.range),
                };
                add.add(acc, gradient)?;
                let add_ms = timer.time(|| add.add(acc, gradient))?;
                add.add(acc, gradient)?;
                let encode_ms = timer.time(|| codec.start_encode(&job, out))?;
                codec.finish_encode(out)?;
                let start = Instant::now();
                codec.encode(&job, out)?;
                let to_host_ms = 1e3 * start.elapsed().as_secs_f64();
                inbox.copy_from(out.message(0))?;
                codec.upload(inbox, &place)?;
                add.add(acc, gradient)?;
                let decode =
                    || codec.start_decode_uploaded(inbox, &place, (&mut *acc).into(), false);
                let decode_ms = timer.time(decode)?;
                codec.finish_decode(inbox, &place)?;
                let start = Instant::now();
                codec.add_decoded(inbox, &place, (&mut *acc).into())?;
                let from_host_ms = 1e3 * start.elapsed().as_secs_f64();
                // The first round compiles and allocates.
                if round > 0 {
                    let all = [add_ms, encode_ms, decode_ms, to_host_ms, from_host_ms];
                    times.iter_mut().zip(all).for_each(|(times, time)| times.push(time));
                }
            }
        }
        device.synchronize()?;
        let rows = sides.iter().zip(times).map(|((codec, out, _), times)| {
            let [add_ms, encode_ms, decode_ms, to_host_ms, from_host_ms] = times.map(median);
            let (codec, bytes) = (codec.spec().name(), out.message(0).len());
            Measured {
                codec,
                elements,
                bytes,
                add_ms,
                encode_ms,
                decode_ms,
                to_host_ms,
                from_host_ms,
            }
        });
        Ok(rows.collect())
    }
}

/// The measurements of PowerSGD, in milliseconds on the card.
#[derive(Clone, Copy, Debug)]
pub struct PowerMeasured {
    /// `r += g`.
    pub add_ms: f64,
    /// Adding gradient and residual, and computing P.
    pub p_ms: f64,
    /// Computing Q.
    pub q_ms: f64,
    /// Computing the result and the new residual.
    pub end_ms: f64,
}

impl Bench {
    /// Measures PowerSGD with this rank, on a matrix as close to square as possible.
    pub fn measure_power(
        &mut self,
        rank: usize,
        repeats: usize,
    ) -> Result<PowerMeasured, DeviceError> {
        let Self { timer, add, gradient, owed, acc, device } = self;
        let (len, Shape { rows, columns }) = (gradient.len(), Shape::of(&[gradient.len()]));
        let kernels = PowerKernels::new(device, rank, ValueType::F32)?;
        let (mut elements, mut out) = (device.zeros(len)?, device.zeros(len)?);
        let mut p = device.upload(&gaussian(rows * rank, 3))?;
        let mut q = device.upload(&gaussian(columns * rank, 4))?;
        let own = device.upload(&gaussian(columns * rank, 5))?;
        let mut bands = device.zeros(kernels.bands_len(rows, columns))?;
        let mut header = device.zeros::<u64>(1)?;
        let mut times = [const { Vec::new() }; 4];
        for round in 0..=repeats {
            let mut matrix =
                Matrix { rows, columns, elements: &mut elements, p: &mut p, q: &mut q };
            add.add(acc, gradient)?;
            let add_ms = timer.time(|| add.add(acc, gradient))?;
            add.add(acc, gradient)?;
            let p_ms = timer
                .time(|| kernels.begin(gradient.values(), Some(owed), &mut matrix, &mut header))?;
            add.add(acc, gradient)?;
            let q_ms = timer.time(|| kernels.go_on(&mut matrix, &mut bands, len))?;
            add.add(acc, gradient)?;
            let end_ms = timer.time(|| kernels.end(&mut matrix, &own, &mut out, len))?;
            // The first round warms up.
            if round > 0 {
                let all = [add_ms, p_ms, q_ms, end_ms];
                times.iter_mut().zip(all).for_each(|(times, time)| times.push(time));
            }
        }
        let [add_ms, p_ms, q_ms, end_ms] = times.map(median);
        Ok(PowerMeasured { add_ms, p_ms, q_ms, end_ms })
    }
}

/// Speed in GB/s of 256 MiB copies between the card and pinned memory: to the host, and to the
/// card.
pub fn copy_speed(device: &Arc<Device>) -> Result<(f64, f64), DeviceError> {
    const BYTES: usize = 256 << 20;
    let mut pinned = Pinned::new(device, BYTES)?;
    let mut buffer = device.zeros::<u8>(BYTES)?;
    let timer = Timer::new(device)?;
    let (mut to_host, mut to_card) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        to_host.push(timer.time(|| device.copy_to_host(&buffer, BYTES, &mut pinned))?);
        to_card.push(timer.time(|| device.copy_to_card(&pinned, BYTES, &mut buffer))?);
    }
    let speed = |times| BYTES as f64 / 1e6 / median(times);
    Ok((speed(to_host), speed(to_card)))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Numbers from a bell-shaped distribution of variance one: sums of four uniform numbers.
fn gaussian(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let sum: u64 = (0..4).map(|k| state >> (16 * k) & 0xffff).sum();
        (sum as f32 - 131_070.0) / 37_837.0
    };
    (0..len).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_to_measure_with_have_variance_one() {
        let values = gaussian(100_000, 1);
        let mean = values.iter().sum::<f32>() / 1e5;
        let variance = values.iter().map(|x| x * x).sum::<f32>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }

    #[test]
    fn medians_do_not_mind_one_slow_run() {
        assert_eq!(median(vec![3.0, 1.0, 90.0, 2.0, 2.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }
}
