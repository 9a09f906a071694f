//! Each codec against a reference that was written from its description.

use std::num::NonZeroUsize;
use std::ops::Range;

use farwire_codec::*;
use proptest::prelude::*;

use crate::{Random, all_messages, messages};

/// What an encoder made of a job.
struct Outcome {
    decoded: Vec<f32>,
    residual: Vec<f32>,
    messages: Vec<Vec<u8>>,
}

fn run(codec: &dyn MessageCodec, job: &Job<'_>) -> Outcome {
    let mut out = Encoded::default();
    codec.encode(job, &mut out).unwrap();
    let mut decoded = vec![0.0; job.values.len()];
    for (message, shard) in out.messages.iter().zip(job.shards) {
        let first = job.place.range.start;
        let part = &mut decoded[shard.start - first..shard.end - first];
        let place = job.place.part(shard.clone());
        codec.add_decoded_into(message, &place, part).unwrap();
        let mut dirty = vec![f32::NAN; part.len()];
        codec.decode_into(message, &place, &mut dirty).unwrap();
        assert_eq!(bits(&dirty), bits(part), "what was in the buffer means nothing");
        let thirds: Vec<_> = part.iter().map(|value| value / 3.0).collect();
        codec.decode_divided_into(message, &place, &mut dirty, 3.0).unwrap();
        assert_eq!(bits(&dirty), bits(&thirds), "decoded, and divided");
        assert!(message.len() <= codec.max_message_len(shard.len()));
    }
    Outcome { decoded, residual: out.residual, messages: out.messages }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn place(n: usize) -> CodedPlace {
    CodedPlace::whole(Context { seed: 1, step: 2, tensor: 3 }, n)
}

/// `0..n` cut into `parts`.
fn cut(n: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|part| n * part / parts..n * (part + 1) / parts).collect()
}

/// Indices of the `k` largest magnitudes, the lowest index first among equals, by sorting
/// everything.
fn largest(values: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..values.len()).collect();
    order.sort_by(|i, j| values[*j].abs().total_cmp(&values[*i].abs()).then(i.cmp(j)));
    order.truncate(k);
    order.sort_unstable();
    order
}

fn awkward() -> impl Strategy<Value = Vec<f32>> {
    let element = prop_oneof![
        4 => -1.0f32..1.0,
        1 => Just(0.0f32),
        1 => Just(-0.0f32),
        1 => Just(0.5f32),
        1 => Just(-0.5f32),
        1 => (0u32..0x0080_0000).prop_map(f32::from_bits),
        1 => 1e30f32..1e38,
    ];
    prop_oneof![
        8 => prop::collection::vec(element, 0..700),
        1 => (0usize..700, -2.0f32..2.0).prop_map(|(n, x)| vec![x; n]),
        1 => (0usize..700).prop_map(|n| vec![0.0; n]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn top_k_is_a_full_sort(values in awkward(), k in 1usize..800, parts in 1usize..5, threads in 1usize..4) {
        let n = values.len();
        let codec = messages(&format!("topk:count={k},values=f32")).unwrap();
        let (place, shards) = (place(n), cut(n, parts));
        let threads = NonZeroUsize::new(threads).unwrap();
        let Outcome { decoded, residual, messages } =
            run(&*codec, &Job { threads, ..Job::worker(&values, Residual::Zero, &place, &shards) });
        let kept = largest(&values, k);
        let count: u32 = messages.iter().map(|m| u32::from_le_bytes(m[..4].try_into().unwrap())).sum();
        prop_assert_eq!(count as usize, k.min(n));
        let (mut want, mut left) = (vec![0.0; n], values.clone());
        for i in kept {
            want[i] = values[i] + 0.0;
            left[i] = 0.0;
        }
        prop_assert_eq!(bits(&decoded), bits(&want));
        prop_assert_eq!(bits(&residual), bits(&left));
    }

    #[test]
    fn top_k_per_chunk_is_a_full_sort_of_each(values in awkward(), keep in 1usize..8, more in 0usize..100, parts in 1usize..4, threads in 1usize..4) {
        let (n, chunk) = (values.len(), keep + more);
        let codec = messages(&format!("topk:{keep}/{chunk},values=f32")).unwrap();
        let (place, shards) = (place(n), cut(n, parts));
        let threads = NonZeroUsize::new(threads).unwrap();
        let outcome = run(&*codec, &Job { threads, ..Job::worker(&values, Residual::Zero, &place, &shards) });
        let mut want = vec![0.0; n];
        for (c, values) in values.chunks(chunk).enumerate() {
            for i in largest(values, (keep * values.len()).div_ceil(chunk)) {
                want[c * chunk + i] = values[i] + 0.0;
            }
        }
        prop_assert_eq!(bits(&outcome.decoded), bits(&want));
    }

    #[test]
    fn owners_keep_their_share_or_everything(sums in awkward(), k in 1usize..300, before in 0usize..500, after in 0usize..500) {
        let (n, len) = (before + sums.len() + after, sums.len());
        let place = CodedPlace { range: before..before + len, ..place(n) };
        let global = messages(&format!("topk:count={k},values=f32")).unwrap();
        let outcome = run(&*global, &Job::owner(&sums, Residual::Zero, &place));
        let share = (k.min(n) * len).div_ceil(n.max(1));
        let mut want = vec![0.0; len];
        largest(&sums, share).into_iter().for_each(|i| want[i] = sums[i] + 0.0);
        prop_assert_eq!(bits(&outcome.decoded), bits(&want));
        let union = messages(&format!("topk:count={k},values=f32,mode=union")).unwrap();
        let outcome = run(&*union, &Job::owner(&sums, Residual::Zero, &place));
        prop_assert_eq!(&outcome.decoded, &sums);
    }

    /// For every encoder, what is decoded and what is owed add up to the input, and the bits depend
    /// neither on threads nor on what was in the output before.
    #[test]
    fn decoded_plus_residual_is_the_input(values in awkward(), parts in 1usize..5, threads in 2usize..5) {
        let n = values.len();
        let (place, shards) = (place(n), cut(n, parts));
        for (name, codec) in all_messages() {
            let job = Job::worker(&values, Residual::Zero, &place, &shards);
            let outcome = run(&*codec, &job);
            for i in 0..n {
                let sum = outcome.decoded[i] + outcome.residual[i];
                let scale = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                prop_assert!((sum - values[i]).abs() <= scale * 1e-6, "{name}: {sum} for {}", values[i]);
                prop_assert_eq!((values[i] - outcome.decoded[i]) + 0.0, outcome.residual[i] + 0.0, "{}", name);
            }
            let mut used = Encoded::default();
            used.messages = vec![vec![7; 9]; 3];
            used.residual = vec![3.0; n / 2 + 1];
            let threads = NonZeroUsize::new(threads).unwrap();
            codec.encode(&Job { threads, ..job }, &mut used).unwrap();
            prop_assert_eq!(&used.messages, &outcome.messages, "{}", name);
            prop_assert_eq!(bits(&used.residual), bits(&outcome.residual), "{}", name);
        }
    }

    #[test]
    fn int8_is_the_nearest_multiple_of_its_scale(values in prop::collection::vec(-3.0f32..3.0, 0..700)) {
        let (place, shards) = (place(values.len()), cut(values.len(), 1));
        let outcome = run(&*messages("int8").unwrap(), &Job::worker(&values, Residual::Zero, &place, &shards));
        for (values, decoded) in values.chunks(256).zip(outcome.decoded.chunks(256)) {
            let top = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (value, decoded) in values.iter().zip(decoded) {
                let code = (value * (127.0 / top)).round_ties_even();
                prop_assert_eq!(*decoded, if top > 0.0 { code * (top / 127.0) } else { 0.0 });
            }
        }
    }

    #[test]
    fn casts_are_what_half_says(values in prop::collection::vec(-70000.0f32..70000.0, 0..100)) {
        let (place, shards) = (place(values.len()), cut(values.len(), 2));
        let job = Job::worker(&values, Residual::Zero, &place, &shards);
        for (value, decoded) in values.iter().zip(run(&*messages("bf16").unwrap(), &job).decoded) {
            prop_assert_eq!(decoded, half::bf16::from_f32(*value).to_f32());
        }
        for (value, decoded) in values.iter().zip(run(&*messages("f16").unwrap(), &job).decoded) {
            prop_assert_eq!(decoded, half::f16::from_f32(value.clamp(-65504.0, 65504.0)).to_f32());
        }
    }
}

#[test]
fn top_k_of_a_large_vector_is_a_full_sort_whatever_the_sample_says() {
    let mut random = Random(11);
    let n = 200_000;
    let gaussian = random.normals(n);
    // Hard to sample: all large elements are in one place.
    let hidden: Vec<f32> = (0..n)
        .map(|i| if (777..3777).contains(&i) { 5.0 + random.normal() } else { 0.0 })
        .collect();
    let few: Vec<f32> = (0..n).map(|i| if i % 1000 == 5 { random.normal() } else { 0.0 }).collect();
    let steep: Vec<f32> = (0..n).map(|_| random.normal().powi(9)).collect();
    for values in [gaussian, hidden, few, steep, vec![0.25; n], vec![0.0; n]] {
        for k in [1, 200, 2000, 20_000, n - 1] {
            let codec = messages(&format!("topk:count={k},values=f32")).unwrap();
            let (place, shards) = (place(n), cut(n, 3));
            let outcome = run(&*codec, &Job::worker(&values, Residual::Zero, &place, &shards));
            let mut want = vec![0.0; n];
            largest(&values, k).into_iter().for_each(|i| want[i] = values[i]);
            assert!(outcome.decoded == want);
        }
    }
}

/// Vectors of more than 2²¹ elements are written past the caches: another path to the same bits.
#[test]
fn long_vectors_come_out_the_same_for_any_number_of_threads() {
    let n = (1 << 21) + 4999;
    let mut random = Random(23);
    let values: Vec<f32> = (0..n).map(|_| random.uniform() as f32 - 0.5).collect();
    let (place, shards) = (place(n), cut(n, 3));
    for (name, codec) in all_messages() {
        let one = run(&*codec, &Job::worker(&values, Residual::Zero, &place, &shards));
        for ((value, decoded), left) in values.iter().zip(&one.decoded).zip(&one.residual) {
            assert_eq!((value - decoded) + 0.0, left + 0.0, "{name}");
        }
        let threads = NonZeroUsize::new(3).unwrap();
        let three =
            run(&*codec, &Job { threads, ..Job::worker(&values, Residual::Zero, &place, &shards) });
        assert!(
            one.messages == three.messages && bits(&one.residual) == bits(&three.residual),
            "{name}"
        );
        // A part that is encoded on its own, in the same blocks, gives the same bytes.
        if matches!(name, "int8" | "sign") {
            let part = place.part(shards[0].clone());
            let short =
                run(&*codec, &Job::owner(&values[shards[0].clone()], Residual::Zero, &part));
            assert!(short.messages[0] == one.messages[0], "{name}");
        }
    }
}

#[test]
fn random_k_sends_the_same_elements_on_every_rank_and_others_each_step() {
    let n = 10_000;
    let codec = messages("randk:0.01,values=f32").unwrap();
    let mut random = Random(5);
    let shards = cut(n, 7);
    let sent = |values: &[f32], step| {
        let place = CodedPlace::whole(Context { seed: 1, step, tensor: 3 }, n);
        let outcome = run(&*codec, &Job::worker(values, Residual::Zero, &place, &shards));
        let sent: Vec<_> = (0..n).filter(|i| outcome.decoded[*i] != 0.0).collect();
        assert!(
            sent.iter().all(|i| outcome.decoded[*i] == values[*i] && outcome.residual[*i] == 0.0)
        );
        sent
    };
    let (a, b) = (random.normals(n), random.normals(n));
    assert_eq!(sent(&a, 1).len(), 100);
    assert_eq!(sent(&a, 1), sent(&b, 1));
    assert_ne!(sent(&a, 1), sent(&a, 2));
}

#[test]
fn random_k_without_feedback_is_right_in_the_mean() {
    let n = 103;
    let codec = messages("randk:count=10,values=f32").unwrap();
    let values = Random(5).normals(n);
    let mut mean = vec![0.0f64; n];
    let steps = 20_000;
    for step in 0..steps {
        let place = CodedPlace::whole(Context { seed: 1, step, tensor: 3 }, n);
        let outcome = run(&*codec, &Job::worker(&values, Residual::Off, &place, &cut(n, 2)));
        assert!(outcome.residual.is_empty());
        mean.iter_mut()
            .zip(&outcome.decoded)
            .for_each(|(mean, x)| *mean += f64::from(*x) / steps as f64);
    }
    for (mean, value) in mean.iter().zip(&values) {
        assert!(
            (mean - f64::from(*value)).abs() < 0.03 * f64::from(value.abs()).max(1.0) * 5.0,
            "{mean} for {value}"
        );
    }
}

#[test]
fn stochastic_rounding_is_right_in_the_mean_and_differs_between_ranks() {
    let values = Random(9).normals(512);
    for name in [
        "int8,rounding=stochastic",
        "int4,rounding=stochastic",
        "fp8,rounding=stochastic",
        "int4,rotate=on,rounding=stochastic",
    ] {
        let codec = messages(name).unwrap();
        let (steps, shards) = (3000, cut(512, 1));
        let mut mean = vec![0.0f64; 512];
        for step in 0..steps {
            let place = CodedPlace::whole(Context { seed: 1, step, tensor: 3 }, 512);
            let job = Job::worker(&values, Residual::Off, &place, &shards);
            let outcome = run(&*codec, &job);
            mean.iter_mut()
                .zip(&outcome.decoded)
                .for_each(|(mean, x)| *mean += f64::from(*x) / steps as f64);
            if step == 0 {
                assert_ne!(outcome.messages, run(&*codec, &Job { rank: 1, ..job }).messages);
            }
        }
        // Steps of int4 are about 3.5 / 7 = 0.5, so one sample is off by at most that and the mean
        // by 0.25 / √3000.
        let worst = mean
            .iter()
            .zip(&values)
            .map(|(mean, value)| (mean - f64::from(*value)).abs())
            .fold(0.0, f64::max);
        assert!(worst < 0.03, "{name}: {worst}");
    }
}

#[test]
fn nan_and_infinity_are_refused_and_named() {
    let shards = cut(5000, 3);
    let place = place(5000);
    for (name, codec) in all_messages() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for index in [0, 1234, 4999] {
                let mut values = vec![1.0; 5000];
                values[index] = bad;
                let error = codec.encode(
                    &Job::worker(&values, Residual::Zero, &place, &shards),
                    &mut Encoded::default(),
                );
                assert_eq!(error, Err(EncodeError::NotFinite { index }), "{name}");
            }
        }
        let huge = vec![f32::MAX; 5000];
        let job = Job::worker(&huge, Residual::Owed(&huge), &place, &shards);
        let error = codec.encode(&job, &mut Encoded::default());
        assert_eq!(error, Err(EncodeError::NotFinite { index: 0 }), "{name}: a sum that overflows");
    }
    let codec = PowerSgd { rank: 2 };
    let values = [1.0, f32::NAN, 1.0, 1.0];
    let begun = codec.begin(
        values.as_slice().into(),
        Residual::Zero,
        None,
        Shape::of(&[2, 2]),
        Context::default(),
    );
    assert_eq!(begun.unwrap_err(), EncodeError::NotFinite { index: 1 });
}

#[test]
fn other_float_types_are_converted() {
    let n = 3000;
    let values: Vec<f32> =
        Random(2).normals(n).iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
    let bf16: Vec<_> = values.iter().map(|x| half::bf16::from_f32(*x)).collect();
    let f64: Vec<_> = values.iter().map(|x| f64::from(*x)).collect();
    let (place, shards) = (place(n), cut(n, 2));
    for (_, codec) in all_messages() {
        let want =
            run(&*codec, &Job::worker(&values, Residual::Owed(&values), &place, &shards)).messages;
        assert_eq!(
            run(&*codec, &Job::worker(&bf16, Residual::Owed(&values), &place, &shards)).messages,
            want
        );
        assert_eq!(
            run(&*codec, &Job::worker(&f64, Residual::Owed(&values), &place, &shards)).messages,
            want
        );
    }
    let f16: Vec<_> = values.iter().map(|x| half::f16::from_f32(*x)).collect();
    let back: Vec<_> = f16.iter().map(|x| x.to_f32()).collect();
    let codec = messages("int8").unwrap();
    let want = run(&*codec, &Job::worker(&back, Residual::Zero, &place, &shards)).messages;
    assert_eq!(run(&*codec, &Job::worker(&f16, Residual::Zero, &place, &shards)).messages, want);
}

#[test]
fn huge_and_tiny_values_stay_finite() {
    for (name, codec) in all_messages() {
        for x in [f32::MAX, 1e35, 1e-38, 1e-44] {
            let values: Vec<f32> =
                (0..600).map(|i| if i % 3 == 0 { x } else { -x / 2.0 }).collect();
            let outcome =
                run(&*codec, &Job::worker(&values, Residual::Zero, &place(600), &cut(600, 1)));
            let finite = outcome.decoded.iter().chain(&outcome.residual).all(|x| x.is_finite());
            assert!(finite, "{name}: {x}");
        }
    }
}

#[test]
fn powersgd_is_exact_for_matrices_of_its_rank() {
    let (rows, columns, ranks) = (30, 20, 3);
    let mut random = Random(17);
    let (a, b) = (random.normals(2 * rows), random.normals(2 * columns));
    let entry = |i: usize| {
        a[i / columns] * b[i % columns] + a[rows + i / columns] * b[columns + i % columns]
    };
    let gradients: Vec<Vec<f32>> = (0..ranks)
        .map(|rank| (0..rows * columns).map(|i| entry(i) * (rank as f32 + 1.0)).collect())
        .collect();
    let (shape, codec) = (Shape::of(&[rows, columns]), PowerSgd { rank: 2 });
    let sum = |parts: Vec<&[f32]>| {
        (0..parts[0].len()).map(|i| parts.iter().map(|part| part[i]).sum()).collect::<Vec<f32>>()
    };
    let begin = |g: &Vec<f32>| {
        codec.begin(g.as_slice().into(), Residual::Zero, None, shape, Context::default()).unwrap()
    };
    let waiting: Vec<_> = gradients.iter().map(begin).collect();
    let p = sum(waiting.iter().map(PowerP::p).collect());
    let waiting: Vec<_> =
        waiting.into_iter().map(|rank| rank.with_sum(p.clone()).unwrap()).collect();
    let q = sum(waiting.iter().map(PowerQ::q).collect());
    assert_eq!((p.len(), q.len()), codec.factor_lens(shape));
    for rank in waiting {
        let mut result = vec![0.0; rows * columns];
        let state = rank.with_sum(q.clone(), &mut result).unwrap();
        for (i, x) in result.iter().enumerate() {
            assert!((x - 6.0 * entry(i)).abs() < 1e-4, "{x} for {}", 6.0 * entry(i));
        }
        assert!(state.residual.iter().all(|left| left.abs() < 1e-4));
    }
}

#[test]
fn powersgd_recovers_from_a_gradient_of_zeros() {
    let codec = PowerSgd { rank: 1 };
    let begin = |g: &[f32], warm: Option<&[f32]>| {
        codec.begin(g.into(), Residual::Zero, warm, Shape::of(&[2, 2]), Context::default())
    };
    let step = |g: &[f32], warm: Option<&[f32]>, acc: &mut [f32]| {
        let waiting = begin(g, warm).unwrap();
        let p = waiting.p().to_vec();
        let waiting = waiting.with_sum(p).unwrap();
        let q = waiting.q().to_vec();
        waiting.with_sum(q, acc).unwrap()
    };
    let state = step(&[0.0; 4], None, &mut [0.0; 4]);
    let mut result = [0.0; 4];
    step(&[1.0, 2.0, 2.0, 4.0], Some(&state.warm), &mut result);
    assert!(
        result.iter().zip([1.0, 2.0, 2.0, 4.0]).all(|(x, want)| (x - want).abs() < 1e-5),
        "{result:?}"
    );
}
