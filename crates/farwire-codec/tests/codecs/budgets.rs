//! Bytes on the wire and distortion, against the figures the codecs promise.

use farwire_codec::*;

use crate::{Random, all_messages, messages};

fn encode(name: &str, values: &[f32]) -> Encoded {
    let place = CodedPlace::whole(Context::default(), values.len());
    let mut out = Encoded::default();
    let job = Job::worker(values, Residual::Zero, &place, std::slice::from_ref(&place.range));
    messages(name).unwrap().encode(&job, &mut out).unwrap();
    out
}

#[test]
fn bits_per_kept_element() {
    // 16 Mi in the long form; the cost per element is the same from a million on.
    let n: usize = if crate::long() { 1 << 24 } else { 1 << 20 };
    let values = Random(1).normals(n);
    let kept = (n as f64 * 0.01).round();
    for (name, kept, budget) in [
        ("topk:0.01,values=f32", kept, 32.0 + 8.25),
        ("topk:0.01", kept, 24.4),
        ("topk:0.01,values=int8", kept, 16.6),
        ("topk:64/4096,values=int8", n as f64 / 64.0, 15.9),
        ("randk:0.01", kept, 16.0),
        ("int8", n as f64, 8.0 * 1.03),
        ("int4", n as f64, 4.0 * 1.03),
        ("fp8", n as f64, 8.0 * 1.03),
        ("sign", n as f64, 1.03),
    ] {
        let bits = 8.0 * encode(name, &values).messages[0].len() as f64 / kept;
        println!("{name}: {bits:.3} bits per element sent, at most {budget}");
        assert!(bits <= budget, "{name}: {bits}");
    }
}

/// The registry's own promise, which `--help` prints.
#[test]
fn messages_are_as_long_as_expected() {
    let n = 1 << 18;
    let values = Random(1).normals(n);
    for (name, codec) in all_messages() {
        let (len, expected) = (encode(name, &values).messages[0].len(), codec.expected_len(n));
        let close = 0.02 * expected as f64 + 32.0;
        assert!(
            (len as f64 - expected as f64).abs() <= close,
            "{name}: {len} bytes, expected {expected}"
        );
        assert!(expected <= codec.max_message_len(n), "{name}");
    }
}

#[test]
fn a_message_is_never_much_longer_than_dense() {
    let values = Random(2).normals(100_000);
    for fraction in [1.0, 0.99, 0.9, 0.5, 0.3, 0.1] {
        let len = encode(&format!("topk:{fraction},values=f32"), &values).messages[0].len();
        assert!(len as f64 <= 4.0 * 100_000.0 * 1.02, "{fraction}: {len}");
    }
}

/// The energy of the residual, relative to that of the input.
fn distortion(name: &str, values: &[f32]) -> f64 {
    let energy = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    energy(&encode(name, values).residual) / energy(values)
}

#[test]
fn distortion_on_a_gaussian() {
    let values = Random(3).normals(1 << 18);
    // Outliers in a few places, which rotation must spread.
    let spiky: Vec<f32> =
        (0..1 << 18).map(|i| if i % 97 == 0 { 20.0 } else { 0.1 } * values[i]).collect();
    for (name, values, bound) in [
        ("sign", &values, 0.363 * 1.05),
        ("int4,rotate=on", &values, 0.0095 * 1.05),
        ("int4,rotate=on", &spiky, 0.0095 * 1.05),
        ("int4", &values, 0.019),
        ("int8", &values, 6e-5),
        ("int8,rotate=on", &spiky, 6e-5),
        ("fp8", &values, 8e-4),
    ] {
        let distortion = distortion(name, values);
        println!("{name}: {distortion:.6}, at most {bound:.6}");
        assert!(distortion <= bound, "{name}: {distortion}");
    }
}
