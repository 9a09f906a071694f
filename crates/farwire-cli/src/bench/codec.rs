//! `farwire bench codec`: how fast a codec is by itself, compared with a `b += a` pass over the
//! same memory in the same run.

use std::fmt;
use std::hint::black_box;
use std::io::Write;
use std::num::NonZeroUsize;
use std::time::Instant;

use farwire::{CodecChoice, CodecSpec, cpu_time};
use farwire_codec::{
    CodedPlace, Context, Encoded, Job, MessageCodec, PowerSgd, Residual, Shape, Travel, add_at,
    typical,
};
use serde::Serialize;

use super::{Args, BenchError};
use crate::units::show_bytes;

/// Elements of a shard whose accumulator stays in the second-level cache.
const SHARD: usize = 1 << 18;

/// One line of the result. Rates are in GB/s of f32 gradient.
#[derive(Debug, Serialize)]
struct Row {
    codec: String,
    bytes: usize,
    threads: usize,
    encode_gbs: f64,
    decode_gbs: f64,
    /// `b += a` on one thread.
    add_gbs: f64,
    /// Zeroing a vector, before the elements that a sparse codec has sent are added to it; and the
    /// same in memory that has just come from the system.
    fill_gbs: Option<f64>,
    fresh_gbs: Option<f64>,
    roofline_fraction: f64,
    decode_roofline_fraction: f64,
    /// How many sent elements are decoded and added per second, to an accumulator out of cache, and
    /// in cache.
    kept_per_s: f64,
    kept_per_s_cached: f64,
    /// The bare additions of the same elements, with indices and values known: the most that memory
    /// allows. For sparse codecs only.
    scatter_per_s: Option<f64>,
    scatter_per_s_cached: Option<f64>,
    bits_per_kept: f64,
    ratio: f64,
}

/// Measures each codec at each size.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let codecs = codecs(args)?;
    let mut out = std::io::stdout().lock();
    if !args.json {
        writeln!(
            out,
            "encode with error feedback, decode and add; GB/s of gradient, {} threads, best of {}; `bound`: the bare additions",
            args.threads,
            repeats(args)
        )?;
        writeln!(
            out,
            "{:<26} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "codec",
            "size",
            "b += a",
            "encode",
            "of that",
            "decode",
            "of that",
            "Mkept/s",
            "bound",
            "cached",
            "bound",
            "bits"
        )?;
    }
    for size in &args.size {
        let (gradient, owed) = (gaussian(size / 4, 1), gaussian(size / 4, 2));
        for codec in &codecs {
            let row = match codec.travels() {
                Travel::Shards(coder) | Travel::Whole(coder) => {
                    messages(args, codec, &*coder, &gradient, &owed)
                }
                Travel::Factors(coder) => factors(args, codec, coder, &gradient, &owed),
            };
            if args.json {
                writeln!(
                    out,
                    "{}",
                    serde_json::to_string(&row).expect("plain numbers and names serialise")
                )?;
            } else {
                writeln!(out, "{row}")?;
            }
            out.flush()?;
        }
    }
    Ok(())
}

/// The codecs that were asked for, or all typical ones.
pub(super) fn codecs(args: &Args) -> Result<Vec<CodecSpec>, BenchError> {
    let by_itself = |choice: &CodecChoice| match choice {
        CodecChoice::Given(codec) => Ok(codec.clone()),
        other => Err(BenchError::NotByItself(other.clone())),
    };
    match &args.codec[..] {
        [] => Ok(typical().map(|name| name.parse().expect("these are codecs")).collect()),
        named => named.iter().map(by_itself).collect(),
    }
}

fn repeats(args: &Args) -> u32 {
    args.iters.unwrap_or(7)
}

/// The best of several tries, in seconds.
struct Best {
    seconds: f64,
    /// Whether one thread does the work. If so, its CPU time counts, so that a codec does not look
    /// slow while others want the core too.
    alone: bool,
}

impl Best {
    fn several<const N: usize>(alone: bool) -> [Self; N] {
        std::array::from_fn(|_| Self { seconds: f64::MAX, alone })
    }

    fn of(&mut self, work: impl FnOnce()) {
        let (start, used) = (Instant::now(), cpu_time());
        work();
        let (took, used) = (start.elapsed(), cpu_time().saturating_sub(used));
        let time = if self.alone { used } else { took };
        self.seconds = self.seconds.min(time.as_secs_f64());
    }
}

fn messages(
    args: &Args,
    spec: &CodecSpec,
    coder: &dyn MessageCodec,
    gradient: &[f32],
    owed: &[f32],
) -> Row {
    let n = gradient.len();
    let place = CodedPlace::whole(Context { seed: 1, step: 2, tensor: 3 }, n);
    let threads = NonZeroUsize::new(args.threads as usize).unwrap_or(NonZeroUsize::MIN);
    let whole = std::slice::from_ref(&place.range);
    let job = Job { threads, ..Job::worker(gradient, Residual::Owed(owed), &place, whole) };
    let (mut acc, mut out) = (vec![0.0; n], Encoded::default());
    let kept = (spec.density(n) * n as f64).round() as usize;
    let sparse = kept < n;
    let alone = threads == NonZeroUsize::MIN;
    let [mut add, mut scatter, mut cached, mut cached_scatter] = Best::several(true);
    let [mut encode, mut decode] = Best::several(alone);
    let [mut fill, mut fresh] = Best::several(true);
    coder.encode(&job, &mut out).expect("the values are finite");
    coder.add_decoded_into(&out.messages[0], &place, &mut acc).expect("its own message");
    let sent = (0u32..).zip(&acc).filter(|(_, value)| sparse && **value != 0.0);
    let (indices, values): (Vec<u32>, Vec<f32>) =
        sent.map(|(index, value)| (index, *value)).unzip();
    for _ in 0..repeats(args) {
        add.of(|| add_into(black_box(&mut acc), black_box(gradient)));
        encode.of(|| coder.encode(&job, &mut out).expect("the values are finite"));
        decode.of(|| {
            coder.add_decoded_into(&out.messages[0], &place, &mut acc).expect("its own message")
        });
        if sparse {
            add_into(black_box(&mut acc), black_box(gradient)); // as cold as for the decoder
            coder.encode(&job, &mut out).expect("the values are finite");
            scatter.of(|| add_at(&mut acc, &indices, &values));
            let mut new = Vec::with_capacity(n);
            fresh.of(|| new.resize(n, 0.0f32));
            black_box(new);
            fill.of(|| black_box(&mut acc).fill(0.0));
        }
    }
    let bits = 8.0 * out.messages[0].len() as f64;
    let shard = n.min(SHARD);
    let shards = [0..shard, shard..n];
    coder.encode(&Job { shards: &shards, ..job }, &mut out).expect("the values are finite");
    let part = place.part(0..shard);
    let there = indices.partition_point(|index| (*index as usize) < shard);
    let (indices, values) = (&indices[..there], &values[..there]);
    for _ in 0..200 {
        cached.of(|| {
            coder.add_decoded_into(&out.messages[0], &part, &mut acc[..shard]).expect("its own")
        });
        cached_scatter.of(|| add_at(&mut acc[..shard], indices, values));
    }
    let mut row = Row::new(spec, n, args.threads as usize, add, encode, decode, kept, bits);
    if sparse {
        row.fill_gbs = Some(4e-9 * n as f64 / fill.seconds);
        row.fresh_gbs = Some(4e-9 * n as f64 / fresh.seconds);
        row.kept_per_s_cached = there as f64 / cached.seconds;
        row.scatter_per_s = Some(kept as f64 / scatter.seconds);
        row.scatter_per_s_cached = Some(there as f64 / cached_scatter.seconds);
    } else {
        row.kept_per_s_cached = shard as f64 / cached.seconds;
    }
    row
}

/// PowerSGD on one rank: its encoding is the products with Q and P, its decoding the product of the
/// sums.
fn factors(args: &Args, spec: &CodecSpec, coder: PowerSgd, gradient: &[f32], owed: &[f32]) -> Row {
    let n = gradient.len();
    let shape = Shape::of(&[n]);
    let context = Context { seed: 1, step: 2, tensor: 3 };
    let mut acc = vec![0.0; n];
    let mut warm: Option<Vec<f32>> = None;
    let [mut add, mut encode, mut decode] = Best::several(true);
    for _ in 0..repeats(args) {
        add.of(|| add_into(black_box(&mut acc), black_box(gradient)));
        let mut waiting = None;
        encode.of(|| {
            let residual = Residual::Owed(owed);
            let p = coder
                .begin(gradient.into(), residual, warm.as_deref(), shape, context)
                .expect("finite");
            let sum = p.p().to_vec();
            waiting = Some(p.with_sum(sum).expect("finite"));
        });
        let q = waiting.expect("it was just made");
        decode.of(|| {
            let sum = q.q().to_vec();
            warm = Some(q.with_sum(sum, &mut acc).expect("finite").warm);
        });
    }
    let (p, q) = coder.factor_lens(shape);
    Row::new(spec, n, 1, add, encode, decode, n, 32.0 * (p + q) as f64)
}

impl Row {
    #[allow(clippy::too_many_arguments, reason = "each is one fact, and it is called twice")]
    fn new(
        spec: &CodecSpec,
        n: usize,
        threads: usize,
        add: Best,
        encode: Best,
        decode: Best,
        kept: usize,
        bits: f64,
    ) -> Self {
        let gigabytes = 4e-9 * n as f64;
        Self {
            codec: spec.to_string(),
            bytes: 4 * n,
            threads,
            encode_gbs: gigabytes / encode.seconds,
            decode_gbs: gigabytes / decode.seconds,
            add_gbs: gigabytes / add.seconds,
            fill_gbs: None,
            fresh_gbs: None,
            roofline_fraction: add.seconds / encode.seconds,
            decode_roofline_fraction: add.seconds / decode.seconds,
            kept_per_s: kept as f64 / decode.seconds,
            kept_per_s_cached: 0.0,
            scatter_per_s: None,
            scatter_per_s_cached: None,
            bits_per_kept: bits / kept.max(1) as f64,
            ratio: 32.0 * n as f64 / bits.max(1.0),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound =
            |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{:.0}", rate / 1e6));
        write!(
            f,
            "{:<26} {:>9} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.0} {:>8} {:>8.0} {:>8} {:>8.3}  {:.0}× smaller than f32",
            self.codec,
            show_bytes(self.bytes as f64),
            self.add_gbs,
            self.encode_gbs,
            self.roofline_fraction,
            self.decode_gbs,
            self.decode_roofline_fraction,
            self.kept_per_s / 1e6,
            bound(self.scatter_per_s),
            self.kept_per_s_cached / 1e6,
            bound(self.scatter_per_s_cached),
            self.bits_per_kept,
            self.ratio,
        )
    }
}

/// The pass that a codec is compared with: one read of each vector, one write.
#[inline(never)]
fn add_into(b: &mut [f32], a: &[f32]) {
    b.iter_mut().zip(a).for_each(|(b, a)| *b += a);
}

/// Nearly normally distributed values: a gradient to try codecs on.
pub(super) fn gaussian(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..len).map(|_| (0..6).map(|_| uniform()).sum::<f32>() - 3.0).collect()
}
