//! Messages from anywhere: an error or a result, never a panic or an over-read.

use farwire_codec::*;

use crate::{Random, all_messages};

#[test]
fn mutated_messages_are_decoded_or_refused() {
    let asked = std::env::var("FARWIRE_MUTATIONS").ok().and_then(|count| count.parse().ok());
    let per_decoder = asked.unwrap_or(if crate::long() { 1_000_000 } else { 20_000 });
    for (name, codec) in all_messages() {
        let mut random = Random(13);
        let n = 2000;
        let values: Vec<f32> =
            random.normals(n).iter().map(|x| if x.abs() < 0.5 { 0.0 } else { *x }).collect();
        let place = CodedPlace::whole(Context::default(), n);
        let shards = [0..n / 3, n / 3..n];
        let mut out = Encoded::default();
        let mut good = Vec::new();
        for (k, role) in [Role::Worker, Role::Owner].into_iter().enumerate() {
            let job = Job { role, ..Job::worker(&values, Residual::Zero, &place, &shards) };
            codec.encode(&job, &mut out).unwrap();
            good.push((out.messages[k].clone(), place.part(shards[k].clone())));
        }
        let (mut refused, mut acc) = (0, vec![0.0; n]);
        for _ in 0..per_decoder {
            let (message, place) = &good[random.below(good.len())];
            let bytes = mutate(message, &mut random);
            let acc = &mut acc[..place.range.len()];
            let added = codec.add_decoded_into(&bytes, place, acc);
            refused += usize::from(added.is_err());
            assert_eq!(codec.decode_into(&bytes, place, acc), added, "{name}");
            let finite = added.is_err() || acc.iter().all(|x| x.is_finite());
            assert!(finite, "{name}: a message from the network decodes to what is not finite");
        }
        println!("{name}: {refused} of {per_decoder} refused");
        for (message, place) in &good {
            let acc = &mut acc[..place.range.len()];
            assert!(codec.add_decoded_into(message, place, acc).is_ok());
            let longer = [message.as_slice(), &[0]].concat();
            assert!(
                codec.add_decoded_into(&longer, place, acc).is_err(),
                "{name}: a byte too many"
            );
            if let Some((_, shorter)) = message.split_last() {
                assert!(
                    codec.add_decoded_into(shorter, place, acc).is_err(),
                    "{name}: a byte too few"
                );
            }
        }
    }
}

fn mutate(message: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = message.to_vec();
    for _ in 0..=random.below(4) {
        let len = bytes.len();
        match random.below(6) {
            0 if len > 0 => bytes[random.below(len)] ^= 1 << random.below(8),
            1 if len > 0 => bytes[random.below(len)] = random.bits() as u8,
            2 => bytes.truncate(random.below(len + 1)),
            3 => bytes.extend((0..random.below(40)).map(|_| random.bits() as u8)),
            // The front holds counts and parameters.
            4 if len > 0 => bytes[random.below(len.min(8))] = [0, 1, 0x7f, 0xff][random.below(4)],
            5 if len > 1 => {
                let (from, to) = (random.below(len), random.below(len));
                let run = random.below(len - from.max(to)).min(64);
                bytes.copy_within(from..from + run, to);
            }
            _ => {}
        }
    }
    bytes
}

#[test]
fn a_count_from_the_wire_allocates_nothing_and_is_checked_first() {
    let codec = crate::messages("topk:0.01").unwrap();
    let place = CodedPlace::whole(Context::default(), 10);
    let error =
        codec.add_decoded_into(&u32::MAX.to_le_bytes(), &place, &mut [0.0; 10]).unwrap_err();
    assert_eq!(error, DecodeError::Count { given: u32::MAX as usize, range: 10 });
}
