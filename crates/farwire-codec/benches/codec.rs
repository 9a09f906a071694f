//! How fast each codec is on one core, against a `b += a` pass over the same memory in the same run.
//!
//! ```sh
//! cargo bench -p farwire-codec                             # 16 Mi elements
//! cargo bench -p farwire-codec -- 1048576 topk:0.01 int8   # size, codecs
//! ```
//!
//! Columns: `encode` and `decode` in GB/s of f32 gradient (encode with error feedback; decode adds to an accumulator), each with its
//! fraction of the `b += a` pass; million kept elements decoded per second, for those that keep some; bits on the wire per element sent; ratio against f32.
//! `cached` decodes into an accumulator of 256 Ki elements, as the owner of a shard does.

use std::hint::black_box;
use std::time::Instant;

use farwire_codec::*;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench").peekable();
    let elements = arguments.next_if(|argument| argument.parse::<usize>().is_ok());
    let elements = elements.map_or(1 << 24, |text| text.parse().expect("it parsed just now"));
    let mut codecs: Vec<String> = arguments.collect();
    if codecs.is_empty() {
        codecs = typical().map(String::from).collect();
    }

    let gradient = gaussian(elements, 1);
    let residual = gaussian(elements, 2);
    let mut acc = vec![0.0f32; elements];
    println!("{elements} elements, one thread; best of 7, each beside a b += a pass");
    println!(
        "{:<26} {:>8} {:>6} {:>8} {:>6} {:>8} {:>8} {:>7} {:>7}",
        "codec", "encode", "of b+=a", "decode", "of b+=a", "Mkept/s", "cached", "bits", "ratio"
    );
    for text in &codecs {
        let spec: CodecSpec = text.parse().unwrap_or_else(|error| panic!("{error}"));
        let Some(codec) = spec.messages() else { continue };
        let sent = spec.density(elements) * elements as f64;
        row(text, &*codec, sent, &gradient, &residual, &mut acc);
    }
}

fn row(name: &str, codec: &dyn MessageCodec, sent: f64, gradient: &[f32], residual: &[f32], acc: &mut [f32]) {
    let n = gradient.len();
    let place = CodedPlace::whole(Context { seed: 1, step: 2, tensor: 3 }, n);
    let job = Job::worker(gradient, Residual::Owed(residual), &place, std::slice::from_ref(&place.range));
    let mut out = Encoded::default();
    codec.encode(&job, &mut out).expect("the values are finite");
    let (mut roofline, mut encode, mut decode) = (f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..7 {
        roofline = roofline.min(seconds(|| add(black_box(acc), black_box(gradient))));
        encode = encode.min(seconds(|| codec.encode(&job, &mut out).expect("the values are finite")));
        decode = decode
            .min(seconds(|| codec.add_decoded_into(&out.messages[0], &place, acc).expect("its own message")));
    }
    let kept = out.messages[0].len();
    let bits = 8.0 * kept as f64;
    // A shard's message, into an accumulator that stays in the second-level cache.
    let shard = n.min(1 << 18);
    let shards = [0..shard, shard..n];
    codec
        .encode(&Job::worker(gradient, Residual::Owed(residual), &place, &shards), &mut out)
        .expect("finite values");
    let part = place.part(0..shard);
    let mut cached = f64::MAX;
    for _ in 0..50 {
        cached = cached.min(seconds(|| {
            codec.add_decoded_into(&out.messages[0], &part, &mut acc[..shard]).expect("ours")
        }));
    }
    let gigabytes = 4e-9 * n as f64;
    println!(
        "{name:<26} {:>8.2} {:>6.2} {:>8.2} {:>6.2} {:>8.0} {:>8.0} {:>7.3} {:>7.1}",
        gigabytes / encode,
        roofline / encode,
        gigabytes / decode,
        roofline / decode,
        sent / decode / 1e6,
        sent * shard as f64 / n as f64 / cached / 1e6,
        bits / sent,
        32.0 * n as f64 / bits,
    );
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// The pass that a codec is measured against: one read of each, one write.
#[inline(never)]
fn add(b: &mut [f32], a: &[f32]) {
    b.iter_mut().zip(a).for_each(|(b, a)| *b += a);
}

/// Values of a normal distribution, nearly.
fn gaussian(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..len).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}
