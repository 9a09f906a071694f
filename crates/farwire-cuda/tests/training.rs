//! What training does on a card, compared to the bit with the same formulas on the CPU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use farwire_cuda::*;

mod common;

fn device() -> Option<Arc<Device>> {
    match Device::new(0) {
        Ok(device) => Some(device),
        Err(error) if std::env::var_os("FARWIRE_REQUIRE_GPU").is_some() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Numbers of many sizes and both signs.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..len).map(|_| (next() as f32 / 2e9 - 1.0) * 2f32.powi((next() % 40) as i32 - 30)).collect()
}

fn lengths() -> [usize; 6] {
    [1, 31, 256, 4097, 70_001, common::sized(100_001, 1 << 20)]
}

#[test]
fn adamw_moves_weights_as_on_the_cpu() {
    let Some(device) = device() else { return };
    let training = Training::new(&device).unwrap();
    for len in lengths() {
        let mut weights = numbers(len, 1);
        let on_card = Arc::new(device.upload(&weights).unwrap());
        let (mut first, mut second) = (vec![0.0f32; len], vec![0.0f32; len]);
        let mut moments = (device.zeros::<f32>(len).unwrap(), device.zeros::<f32>(len).unwrap());
        for step in 1..5 {
            let gradient = numbers(len, 10 + step);
            let AdamWStep { scale, beta1, beta2, step, root, decay, epsilon } = AdamWStep {
                scale: 0.37,
                beta1: 0.9,
                beta2: 0.95,
                step: 0.003 / (1.0 - 0.9f32.powi(step as i32)),
                root: (1.0 - 0.95f32.powi(step as i32)).sqrt(),
                decay: 0.9997,
                epsilon: 1e-8,
            };
            let state = first.iter_mut().zip(&mut second);
            for ((x, g), (first, second)) in weights.iter_mut().zip(&gradient).zip(state) {
                let g = g * scale;
                *first = beta1 * *first + (1.0 - beta1) * g;
                *second = beta2 * *second + (1.0 - beta2) * g * g;
                *x = *x * decay - step * *first / (second.sqrt() / root + epsilon);
            }
            let gradient = device.upload(&gradient).unwrap();
            let numbers = AdamWStep { scale, beta1, beta2, step, root, decay, epsilon };
            let moments = (&mut moments.0, &mut moments.1);
            training.adamw(&on_card, moments, gradient.values(), &numbers).unwrap();
        }
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&on_card.download().unwrap()), bits(&weights), "{len} weights");
        assert_eq!(bits(&moments.0.download().unwrap()), bits(&first), "{len} first moments");
        assert_eq!(bits(&moments.1.download().unwrap()), bits(&second), "{len} second moments");
    }
}

#[test]
fn gradients_add_up_at_their_place_and_what_is_not_finite_is_found() {
    let Some(device) = device() else { return };
    let training = Training::new(&device).unwrap();
    for len in lengths() {
        let sum = Arc::new(device.upload(&vec![7.0f32; len + 9]).unwrap());
        let mut found = NotFiniteElements::new(&device, 3).unwrap();
        let (a, b) = (numbers(len, 3), numbers(len, 4));
        let add = |fresh: bool, values: &[f32], found: &mut NotFiniteElements| {
            let gradient = (&Arc::new(device.upload(values).unwrap())).into();
            training.add(&sum, 5, fresh, &gradient, (found, 1)).unwrap();
            sum.download().unwrap()
        };
        add(true, &a, &mut found);
        let both = add(false, &b, &mut found);
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_eq!(both[5..5 + len], expected, "{len}");
        assert!(both[..5].iter().chain(&both[5 + len..]).all(|x| *x == 7.0), "{len}");
        assert_eq!(found.fetch().unwrap(), [None; 3]);
        for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut bad = b.clone();
            let at = len / 2;
            (bad[at], bad[len - 1]) = (value, f32::INFINITY);
            add(true, &a, &mut found);
            add(false, &bad, &mut found);
            let first = found.fetch().unwrap()[1].unwrap();
            let value = if at == len - 1 { f32::INFINITY } else { value };
            assert_eq!((first.0, first.1.is_nan()), (at as u64, value.is_nan()), "{len}");
            assert!(value.is_nan() || first.1 == value, "{len}: {} and {value}", first.1);
        }
        // The next step starts afresh.
        add(true, &a, &mut found);
        assert_eq!(found.fetch().unwrap(), [None; 3], "{len}");
    }
}

#[test]
fn squares_are_those_of_each_vector_and_the_same_every_time() {
    let Some(device) = device() else { return };
    let training = Training::new(&device).unwrap();
    let all: Vec<Vec<f32>> = lengths().iter().map(|len| numbers(*len, 9)).collect();
    let mut on_card: Vec<Buffer<f32>> =
        all.iter().map(|values| device.upload(values).unwrap()).collect();
    let squares = |on_card: &[Buffer<f32>]| {
        let mut vectors: Vec<DeviceValues<'_>> =
            on_card.iter().map(Buffer::<f32>::values).collect();
        vectors.push(on_card[5].part(7..7));
        vectors.push(on_card[5].part(3..100_000));
        training.squares(&vectors).unwrap()
    };
    let sums = squares(&on_card);
    let exact = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let parts = all.iter().map(|values| &values[..]).chain([&[][..], &all[5][3..100_000]]);
    for (sum, values) in sums.iter().zip(parts) {
        let exact = exact(values);
        assert!((sum - exact).abs() <= 1e-12 * exact, "{sum} and {exact}");
    }
    for _ in 0..5 {
        assert_eq!(squares(&on_card), sums);
    }
    // Large values do not overflow, and only sums of vectors with bad values are not finite.
    on_card[0] = device.upload(&[f32::MAX]).unwrap();
    assert_eq!(squares(&on_card)[0], f64::from(f32::MAX).powi(2));
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        on_card[0] = device.upload(&[value]).unwrap();
        let sums = squares(&on_card);
        assert!(!sums[0].is_finite() && sums[1].is_finite(), "{sums:?}");
    }
}

/// A world of one rank used to copy every vector without a codec to the host and back.
#[test]
fn a_vector_without_a_codec_does_not_cross_the_bus_of_a_rank_alone() {
    let Some(device) = device() else { return };
    let comm = farwire::local(1).unwrap().remove(0);
    let values = numbers(5000, 2);
    let gradient = Arc::new(device.upload(&values).unwrap());
    let (cards, before) = (DeviceCommunicator::new(&comm, &device), device.bus());
    let none = farwire::Compressor::new("none".parse().unwrap());
    for op in [farwire::ReduceOp::Sum, farwire::ReduceOp::Mean] {
        cards.all_reduce_compressed("w", &gradient, op, &none).wait().unwrap();
    }
    assert_eq!(device.bus(), before);
    assert_eq!(gradient.download().unwrap(), values);
}
