//! Stochastic rounding: errors are independent of one another, so that they average out.

use farwire_codec::*;

use crate::{Random, messages};

/// The rounding error of each element.
fn errors(codec: &dyn MessageCodec, values: &[f32], role: Role, rank: u32, step: u64) -> Vec<f32> {
    let place = CodedPlace::whole(Context { seed: 5, step, tensor: 1 }, values.len());
    let shards = std::slice::from_ref(&place.range);
    let mut out = Encoded::default();
    let job = Job { role, rank, ..Job::worker(values, Residual::Zero, &place, shards) };
    codec.encode(&job, &mut out).unwrap();
    out.residual
}

fn correlation(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn an_owner_does_not_repeat_the_errors_it_made_as_a_worker() {
    for name in ["int8,rounding=stochastic", "int4,rounding=stochastic", "fp8,rounding=stochastic"]
    {
        let codec = messages(name).unwrap();
        let values = Random(11).normals(40_000);
        let draws = [
            (Role::Worker, 0, 0),
            (Role::Owner, 0, 0),
            (Role::Worker, 1, 0),
            (Role::Owner, 1, 0),
            (Role::Worker, 0, 1),
        ];
        let errors = draws.map(|(role, rank, step)| errors(&*codec, &values, role, rank, step));
        for (i, j) in (0..draws.len()).flat_map(|i| (0..i).map(move |j| (i, j))) {
            // For independent errors this exceeds 1/√40,000 = 0.005 one time in three.
            let correlation = correlation(&errors[i], &errors[j]);
            assert!(
                correlation.abs() < 0.025,
                "{name}: {:?}, {:?}: {correlation}",
                draws[i],
                draws[j]
            );
        }
        // Nor are they correlated when shifted against one another.
        for shift in 1..20 {
            let correlation = correlation(&errors[0], &errors[1][shift..]);
            assert!(correlation.abs() < 0.025, "{name}, shifted by {shift}: {correlation}");
        }
    }
}
