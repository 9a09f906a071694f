//! The card against the CPU: the same bytes, residuals, sums and errors.
//!
//! Without a card these tests are skipped and print why; with `FARWIRE_REQUIRE_GPU=1` they fail.
//! `FARWIRE_CUDA_CASES=n` sets the number of inputs for each codec and type (default 150).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use farwire_codec::*;
use farwire_cuda::*;
use half::{bf16, f16};

mod common;

fn device() -> Option<Arc<Device>> {
    static DEVICE: OnceLock<Option<Arc<Device>>> = OnceLock::new();
    let open = || match Device::new(0) {
        Ok(device) => Some(device),
        Err(error) => {
            let required = std::env::var("FARWIRE_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "a GPU is required: {error}");
            eprintln!("skipped: {error}");
            None
        }
    };
    DEVICE.get_or_init(open).clone()
}

fn cases() -> usize {
    std::env::var("FARWIRE_CUDA_CASES").map_or(150, |text| text.parse().unwrap())
}

/// A simple random number generator.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.bits() >> 32) as usize % bound
    }

    /// Close enough to a sample of the normal distribution.
    fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|k| bits >> (16 * k) & 0xffff).sum();
        (sum as f32 - 131_070.0) / 37_837.0
    }
}

/// Values that are hard for codecs, and some that are not.
fn values(random: &mut Random, kind: usize, len: usize) -> Vec<f32> {
    let one = |random: &mut Random| match kind {
        0 | 1 => random.normal(),
        2 => 0.0,
        // Zeros of both signs.
        3 => [0.0, -0.0][random.below(2)],
        // Denormals.
        4 => f32::from_bits(random.bits() as u32 & 0x807f_ffff),
        // Equal magnitudes.
        5 => [1.0, -1.0][random.below(2)],
        // Few magnitudes, and many zeros.
        6 => [0.0, 0.0, -0.0, 1.0, -1.0, 2.0, -0.5, 0.5][random.below(8)],
        // Too large to scale, and too small.
        7 => random.normal() * 1e36,
        8 => random.normal() * 1e-36,
        // Any finite magnitude, block by block and element by element.
        9 => f32::from_bits(random.bits() as u32 & 0xbfff_ffff),
        // One outlier in a hundred.
        10 => random.normal() * if random.below(100) == 0 { 1e4 } else { 1.0 },
        // Mostly zeros.
        _ => {
            if random.below(50) == 0 {
                random.normal()
            } else {
                0.0
            }
        }
    };
    (0..len).map(|_| one(random)).collect()
}
const KINDS: usize = 12;

/// Interesting lengths: short ones, primes, and lengths around the sizes of blocks and tiles.
fn length(random: &mut Random) -> usize {
    const ODD: [usize; 18] = [
        1, 2, 3, 255, 256, 257, 511, 512, 513, 1021, 2047, 2048, 2049, 4093, 4095, 4096, 4097, 8191,
    ];
    match random.below(4) {
        0 => ODD[random.below(ODD.len())],
        1 => 1 + random.below(40),
        2 => 1 + random.below(4097),
        _ => 4097 + random.below(30_000),
    }
}

/// Cuts `range` into up to five shards, some of them empty.
fn cut(random: &mut Random, range: Range<usize>) -> Vec<Range<usize>> {
    let mut ends: Vec<_> =
        (0..random.below(5)).map(|_| range.start + random.below(range.len() + 1)).collect();
    ends.push(range.end);
    ends.sort_unstable();
    let mut start = range.start;
    ends.into_iter().map(|end| std::mem::replace(&mut start, end)..end).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A vector of each type.
enum Gradient {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Gradient {
    fn new(type_: ValueType, values: Vec<f32>) -> Self {
        match type_ {
            ValueType::F32 => Self::F32(values),
            ValueType::F16 => {
                let largest = f16::MAX.to_f32();
                let half = |value: f32| {
                    let clamped =
                        if value.is_finite() { value.clamp(-largest, largest) } else { value };
                    f16::from_f32(clamped)
                };
                Self::F16(values.into_iter().map(half).collect())
            }
            ValueType::Bf16 => {
                let half = |value: f32| {
                    let half = bf16::from_f32(value);
                    if value.is_finite() && !half.is_finite() { bf16::MAX } else { half }
                };
                Self::Bf16(values.into_iter().map(half).collect())
            }
        }
    }

    fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => values.as_slice().into(),
            Self::F16(values) => values.as_slice().into(),
            Self::Bf16(values) => values.as_slice().into(),
        }
    }
}

/// A gradient on the card.
enum Uploaded {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
    Bf16(Buffer<bf16>),
}

impl Uploaded {
    fn new(device: &Arc<Device>, gradient: &Gradient) -> Self {
        match gradient {
            Gradient::F32(values) => Self::F32(device.upload(values).unwrap()),
            Gradient::F16(values) => Self::F16(device.upload(values).unwrap()),
            Gradient::Bf16(values) => Self::Bf16(device.upload(values).unwrap()),
        }
    }

    fn values(&self) -> DeviceValues<'_> {
        match self {
            Self::F32(values) => values.values(),
            Self::F16(values) => values.values(),
            Self::Bf16(values) => values.values(),
        }
    }
}

/// A codec on both sides, with reusable memory.
struct Pair {
    name: String,
    device: Arc<Device>,
    cpu: Arc<dyn MessageCodec>,
    card: DeviceCodec,
    out: DeviceEncoded,
    inbox: Inbox,
}

impl Pair {
    fn new(device: &Arc<Device>, name: &str) -> Self {
        let spec: CodecSpec = name.parse().unwrap();
        Self {
            name: name.into(),
            device: device.clone(),
            cpu: spec.messages().unwrap(),
            card: DeviceCodec::new(device, &spec).unwrap(),
            out: DeviceEncoded::new(device).unwrap(),
            inbox: Inbox::new(device).unwrap(),
        }
    }

    /// Encodes on both sides, and decodes every message into an accumulator.
    fn compare(&mut self, job: &Job<'_>, gradient: &Gradient, tale: &str) {
        let tale = format!("{} {tale}", self.name);
        let device = &self.device;
        let uploaded = Uploaded::new(device, gradient);
        let owed = match job.residual {
            Residual::Owed(owed) => Some(device.upload(owed).unwrap()),
            _ => None,
        };
        let residual = match (&job.residual, &owed) {
            (Residual::Off, _) => DeviceResidual::Off,
            (_, Some(owed)) => DeviceResidual::Owed(owed),
            _ => DeviceResidual::Zero,
        };
        let device_job = DeviceJob {
            values: uploaded.values(),
            residual,
            place: job.place.clone(),
            role: job.role,
            rank: job.rank,
            shards: job.shards,
        };
        let mut want = Encoded::default();
        let on_cpu = self.cpu.encode(job, &mut want).map_err(DeviceError::from);
        let on_card = self.card.encode(&device_job, &mut self.out);
        assert_eq!(on_card, on_cpu, "{tale}");
        if on_cpu.is_err() {
            return;
        }
        assert_eq!(self.out.len(), want.messages.len(), "{tale}");
        for (shard, message) in want.messages.iter().enumerate() {
            let got = self.out.message(shard);
            let differs = got.iter().zip(message).position(|(a, b)| a != b);
            assert!(
                got == message,
                "{tale}: message {shard} of {} bytes, on the CPU {}, differs at {differs:?}",
                got.len(),
                message.len()
            );
        }
        if !matches!(job.residual, Residual::Off) {
            let got = self.out.residual().download_front(want.residual.len()).unwrap();
            let differs =
                got.iter().zip(&want.residual).position(|(a, b)| a.to_bits() != b.to_bits());
            if let Some(at) = differs {
                let (got, want) = (got[at], want.residual[at]);
                panic!("{tale}: residual {at} is {got:e}, on the CPU {want:e}");
            }
        }
        for (shard, message) in job.shards.iter().zip(&want.messages) {
            self.decode(message, &job.place.part(shard.clone()), &tale);
        }
    }

    /// Decodes on both sides, twice adding to other values and once starting afresh.
    fn decode(&mut self, message: &[u8], place: &CodedPlace, tale: &str) {
        let mut random = Random(77);
        let mut want: Vec<f32> = (0..place.range.len()).map(|_| random.normal()).collect();
        // A part that starts anywhere.
        let skip = place.range.start % 5;
        let mut start = vec![0.0; skip];
        start.extend_from_slice(&want);
        let mut acc = self.device.upload(&start).unwrap();
        for fresh in [false, false, true] {
            self.inbox.copy_from(message).unwrap();
            let part = acc.part_mut(skip..skip + want.len());
            let (on_cpu, on_card) = if fresh {
                let on_cpu = self.cpu.decode_into(message, place, &mut want);
                (on_cpu, self.card.decode(&mut self.inbox, place, part))
            } else {
                let on_cpu = self.cpu.add_decoded_into(message, place, &mut want);
                (on_cpu, self.card.add_decoded(&mut self.inbox, place, part))
            };
            assert_eq!(on_card, on_cpu.map_err(DeviceError::from), "{tale} {place:?}");
            if on_cpu.is_err() {
                return;
            }
            let got = acc.download().unwrap();
            let same = bits(&got[skip..]) == bits(&want);
            assert!(same && got[..skip].iter().all(|x| *x == 0.0), "{tale} {place:?} {fresh}");
        }
    }
}

fn supported() -> impl Iterator<Item = &'static str> {
    let has_kernels = |name: &&str| DeviceCodec::supports(&name.parse().unwrap()).is_ok();
    samples().filter(has_kernels).filter(|name| common::is_asked_for(name))
}

/// Tests a codec with one input: any values, any residual, any cut, either role.
fn meet(pair: &mut Pair, random: &mut Random, type_: ValueType, case: usize) {
    // Under a sanitizer this is the only input: its length gives blocks of all sizes, and a tail.
    let (drawn, kind) = (length(random), case % KINDS);
    let whole = common::sized(10_007, drawn);
    let context = Context { seed: random.bits(), step: case as u64, tensor: random.bits() };
    let mut place = CodedPlace::whole(context, whole);
    if random.below(3) == 0 {
        let start = random.below(whole);
        place = place.part(start..start + 1 + random.below(whole - start));
    }
    let len = place.range.len();
    let gradient = Gradient::new(type_, values(random, kind, len));
    let owed_kind = [0, 6, 3, 8][random.below(4)];
    let owed = values(random, owed_kind, len);
    let residual = match random.below(4) {
        0 => Residual::Off,
        1 => Residual::Zero,
        _ => Residual::Owed(&owed),
    };
    let role = [Role::Worker, Role::Owner][random.below(2)];
    let shards = match role {
        Role::Worker => cut(random, place.range.clone()),
        Role::Owner => vec![place.range.clone()],
    };
    let rank = random.below(5) as u32;
    let threads = std::num::NonZeroUsize::MIN;
    let values = gradient.values();
    let job = Job { values, residual, place, role, rank, shards: &shards, threads };
    pair.compare(&job, &gradient, &format!("{type_:?} case {case}, kind {kind}"));
}

#[test]
fn bytes_residuals_and_sums_are_the_cpus() {
    let Some(device) = device() else { return };
    let mut met = 0;
    for name in supported() {
        let mut pair = Pair::new(&device, name);
        for type_ in ValueType::ALL {
            let mut random = Random(0x5eed ^ (type_ as u64) << 32 | 1);
            for case in 0..cases() {
                meet(&mut pair, &mut random, type_, case);
                met += 1;
            }
        }
    }
    eprintln!("{met} inputs, {} codecs", supported().count());
}

#[test]
fn what_is_not_finite_is_the_same_error() {
    let Some(device) = device() else { return };
    for name in supported() {
        let mut pair = Pair::new(&device, name);
        let mut random = Random(3);
        for type_ in ValueType::ALL {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for _ in 0..cases().min(6) {
                    let len = length(&mut random);
                    let mut plain = values(&mut random, 0, len);
                    for _ in 0..1 + random.below(3) {
                        plain[random.below(len)] = bad;
                    }
                    let gradient = Gradient::new(type_, plain);
                    let place = CodedPlace::whole(Context::default(), len);
                    let shards = cut(&mut random, 0..len);
                    let threads = std::num::NonZeroUsize::MIN;
                    let job = Job {
                        values: gradient.values(),
                        residual: Residual::Zero,
                        place,
                        role: Role::Worker,
                        rank: 0,
                        shards: &shards,
                        threads,
                    };
                    pair.compare(&job, &gradient, &format!("{type_:?} {bad}"));
                }
            }
        }
        // Two finite numbers whose sum overflows.
        let (largest, place) = (vec![f32::MAX; 300], CodedPlace::whole(Context::default(), 300));
        let gradient = Gradient::F32(largest.clone());
        let job = Job::worker(
            &largest,
            Residual::Owed(&largest),
            &place,
            std::slice::from_ref(&place.range),
        );
        pair.compare(&job, &gradient, "overflow");
    }
}

/// Messages that were changed, cut short or made longer: both sides refuse them with the same
/// error, or decode them to the same bits.
#[test]
fn damaged_messages_are_taken_as_on_the_cpu() {
    let Some(device) = device() else { return };
    for name in supported() {
        let mut pair = Pair::new(&device, name);
        let mut random = Random(11);
        for case in 0..cases().max(4) {
            let drawn = length(&mut random).min(5000);
            let len = common::sized(4999, drawn);
            let plain = values(&mut random, case % KINDS, len);
            let place = CodedPlace::whole(Context { seed: case as u64, step: 1, tensor: 2 }, len);
            let mut out = Encoded::default();
            let shards = std::slice::from_ref(&place.range);
            pair.cpu.encode(&Job::worker(&plain, Residual::Off, &place, shards), &mut out).unwrap();
            let mut message = out.messages.swap_remove(0);
            match random.below(8) {
                0 => message.truncate(random.below(message.len() + 1)),
                1 => message.extend_from_slice(&[0; 3][..1 + random.below(3)]),
                _ => {
                    for _ in 0..1 + random.below(3) {
                        let at = match random.below(3) {
                            0 => random.below(message.len().min(12)),
                            _ => random.below(message.len()),
                        };
                        message[at] = random.bits() as u8;
                    }
                }
            }
            pair.decode(&message, &place, &format!("{name} damaged {case}"));
        }
    }
}

#[test]
fn more_shards_than_one_launch_takes_are_all_encoded() {
    let Some(device) = device() else { return };
    for name in typical().filter(|name| supported().any(|other| other == *name)) {
        let mut pair = Pair::new(&device, name);
        let len = 20_011;
        let plain = values(&mut Random(5), 0, len);
        let place = CodedPlace::whole(Context { seed: 1, step: 2, tensor: 3 }, len);
        let count = common::sized(70, 200);
        let shards: Vec<_> = (0..count).map(|k| len * k / count..len * (k + 1) / count).collect();
        let job = Job::worker(&plain, Residual::Owed(&plain), &place, &shards);
        pair.compare(&job, &Gradient::F32(plain.clone()), &format!("{count} shards"));
    }
}

/// Long enough that every kernel runs on the whole card, and that top-k guesses its floor.
#[test]
fn long_vectors_are_the_same() {
    let Some(device) = device() else { return };
    let lens: &[usize] = if cases() >= 150 { &[1 << 26, 16_777_213] } else { &[300_007] };
    for len in lens {
        let mut random = Random(9);
        let (plain, owed) = (values(&mut random, 0, *len), values(&mut random, 10, *len));
        let gradient = Gradient::F32(plain.clone());
        for name in typical().filter(|name| supported().any(|other| other == *name)) {
            let mut pair = Pair::new(&device, name);
            let place = CodedPlace::whole(Context { seed: 1, step: 2, tensor: 3 }, *len);
            let shards = [0..len / 3, len / 3..len / 3 * 2 + 1, len / 3 * 2 + 1..*len];
            let threads = std::thread::available_parallelism().unwrap();
            let job =
                Job { threads, ..Job::worker(&plain, Residual::Owed(&owed), &place, &shards) };
            pair.compare(&job, &gradient, &format!("{len} elements"));
        }
    }
}

/// Inputs for which top-k's guess from a sample is far off: the result must not depend on it.
#[test]
fn a_wrong_guess_of_the_threshold_does_not_matter() {
    let Some(device) = device() else { return };
    // Enough tiles for more than one thread block of the histogram.
    let len = common::sized(140_011, 200_003);
    type Shape = (&'static str, fn(usize, usize) -> f32);
    let shapes: [Shape; 5] = [
        ("large at the end", |i, len| if i > len - 3000 { i as f32 } else { 1e-3 }),
        ("large in one tile", |i, _| if (8192..12_288).contains(&i) { i as f32 } else { 1.0 }),
        ("all equal", |_, _| 2.5),
        ("ascending", |i, _| i as f32),
        ("zeros but three", |i, _| if i % 70_000 == 5 { 1.0 } else { 0.0 }),
    ];
    let names = [
        "topk:0.01",
        "topk:0.001",
        "topk:count=3",
        "topk:64/4096,values=int8",
        "topk:0.02,mode=union",
    ];
    for name in names.into_iter().filter(|name| common::is_asked_for(name)) {
        let mut pair = Pair::new(&device, name);
        for (shape, value) in shapes {
            let plain: Vec<f32> = (0..len).map(|i| value(i, len)).collect();
            let place = CodedPlace::whole(Context::default(), len);
            for role in [Role::Worker, Role::Owner] {
                let shards = std::slice::from_ref(&place.range);
                let job = Job { role, ..Job::worker(&plain, Residual::Zero, &place, shards) };
                pair.compare(&job, &Gradient::F32(plain.clone()), shape);
            }
        }
    }
}

/// Error feedback over many steps: residuals stay equal when they are passed from step to step.
#[test]
fn residuals_handed_on_for_many_steps_stay_the_same() {
    let Some(device) = device() else { return };
    let len = 9001;
    for name in typical().filter(|name| supported().any(|other| other == *name)) {
        let mut pair = Pair::new(&device, name);
        let mut random = Random(21);
        let mut owed = device.zeros::<f32>(len).unwrap();
        let mut want = Encoded::default();
        want.residual.resize(len, 0.0);
        for step in 0..common::sized(3, 20) {
            let plain = values(&mut random, 0, len);
            let gradient = device.upload(&plain).unwrap();
            let place = CodedPlace::whole(Context { seed: 1, step, tensor: 3 }, len);
            let shards = [0..4000, 4000..len];
            let before = std::mem::take(&mut want.residual);
            let job = Job::worker(&plain, Residual::Owed(&before), &place, &shards);
            pair.cpu.encode(&job, &mut want).unwrap();
            let job = DeviceJob {
                values: gradient.values(),
                residual: DeviceResidual::Owed(&owed),
                place: place.clone(),
                role: Role::Worker,
                rank: 0,
                shards: &shards,
            };
            pair.card.encode(&job, &mut pair.out).unwrap();
            pair.out.swap_residual(&mut owed);
            assert_eq!(pair.out.message(1), want.messages[1], "{name} step {step}");
            let got = owed.download_front(len).unwrap();
            assert_eq!(bits(&got), bits(&want.residual), "{name} step {step}");
        }
    }
}

/// An all-reduce of three ranks; the second has a card.
#[test]
fn a_card_and_two_cpus_reduce_to_the_same_bits() {
    let Some(device) = device() else { return };
    let (len, world) = (5003, 3);
    for name in supported() {
        let mut pair = Pair::new(&device, name);
        let mut random = Random(31);
        let gradients: Vec<_> = (0..world).map(|_| values(&mut random, 10, len)).collect();
        let place = CodedPlace::whole(Context { seed: 1, step: 2, tensor: 3 }, len);
        let shards = [0..1666, 1666..3335, 3335..len];
        let sent: Vec<Vec<Vec<u8>>> = (0..world)
            .map(|rank| {
                let job = Job::worker(&gradients[rank], Residual::Zero, &place, &shards);
                let mut out = Encoded::default();
                pair.cpu.encode(&Job { rank: rank as u32, ..job }, &mut out).unwrap();
                if rank == 1 {
                    let gradient = device.upload(&gradients[1]).unwrap();
                    let job = DeviceJob {
                        values: gradient.values(),
                        residual: DeviceResidual::Zero,
                        place: place.clone(),
                        role: Role::Worker,
                        rank: 1,
                        shards: &shards,
                    };
                    pair.card.encode(&job, &mut pair.out).unwrap();
                    return (0..world).map(|shard| pair.out.message(shard).to_vec()).collect();
                }
                out.messages
            })
            .collect();
        // The card owns the second shard: it sums and encodes it.
        let part = place.part(shards[1].clone());
        let mut sum = device.zeros::<f32>(part.range.len()).unwrap();
        let mut want = vec![0.0; part.range.len()];
        for rank in &sent {
            pair.inbox.copy_from(&rank[1]).unwrap();
            pair.card.add_decoded(&mut pair.inbox, &part, (&mut sum).into()).unwrap();
            pair.cpu.add_decoded_into(&rank[1], &part, &mut want).unwrap();
        }
        assert_eq!(bits(&sum.download().unwrap()), bits(&want), "{name}");
        let job = DeviceJob {
            values: sum.values(),
            residual: DeviceResidual::Zero,
            place: part.clone(),
            role: Role::Owner,
            rank: 1,
            shards: std::slice::from_ref(&part.range),
        };
        pair.card.encode(&job, &mut pair.out).unwrap();
        let mut out = Encoded::default();
        let job = Job { rank: 1, ..Job::owner(&want, Residual::Zero, &part) };
        pair.cpu.encode(&job, &mut out).unwrap();
        assert_eq!(pair.out.message(0), out.messages[0], "{name}");
    }
}

#[test]
fn every_codec_has_messages_but_low_rank() {
    let all: Vec<_> = samples().collect();
    let missing: Vec<_> = all.iter().filter(|name| !supported().any(|s| s == **name)).collect();
    assert!(missing.iter().all(|name| name.starts_with("powersgd")), "{missing:?}");
    let error = DeviceCodec::supports(&"powersgd:4".parse().unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "powersgd:4 does not run on the card: it has no messages but factors of a matrix, which a \
         DeviceCommunicator sums"
    );
}

#[test]
fn a_card_that_is_not_there_is_an_error_that_says_what_to_do() {
    let error = Device::new(4096).unwrap_err();
    let text = error.to_string();
    match error {
        DeviceError::NoDriver => assert!(text.contains("no NVIDIA driver"), "{text}"),
        DeviceError::NoCard { ordinal, .. } => {
            assert_eq!(ordinal, 4096);
            assert!(text.contains("nvidia-smi"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}
