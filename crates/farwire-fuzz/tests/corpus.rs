//! Every target on its kept corpus and on random changes of it. `FARWIRE_FUZZ_INPUTS` says on how
//! many inputs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::panic::catch_unwind;
use std::path::Path;

use farwire_fuzz::{TARGETS, Target};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The inputs that are kept, each preceded by its length in four bytes.
fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let file = std::fs::read(folder.join(target.name)).unwrap();
    let (mut rest, mut inputs) = (&file[..], Vec::new());
    while let Some((length, after)) = rest.split_first_chunk() {
        let (input, next) = after.split_at(u32::from_le_bytes(*length) as usize);
        inputs.push(input.to_vec());
        rest = next;
    }
    inputs
}

/// Changes an input in one to four places.
fn change(input: &mut Vec<u8>, others: &[Vec<u8>], random: &mut ChaCha8Rng) {
    for _ in 0..random.random_range(1..=4) {
        let at = random.random_range(0..=input.len());
        match random.random_range(0..6) {
            0 if at < input.len() => input[at] ^= 1 << random.random_range(0..8),
            1 if at < input.len() => {
                input[at] = [0, 1, 0x7f, 0x80, 0xff][random.random_range(0..5)]
            }
            2 => input.truncate(at),
            3 => input.insert(at, random.random()),
            4 => {
                let other = &others[random.random_range(0..others.len())];
                let from = random.random_range(0..=other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => {
                let number: u64 = 1 << random.random_range(0..64);
                let bytes = number.wrapping_sub(random.random_range(0..2)).to_le_bytes();
                let end = input.len().min(at + bytes.len());
                input[at..end].copy_from_slice(&bytes[..end - at]);
            }
        }
    }
}

#[test]
fn no_input_makes_anything_panic() {
    let inputs = std::env::var("FARWIRE_FUZZ_INPUTS").map_or(2000, |text| text.parse().unwrap());
    for (seed, target) in TARGETS.iter().enumerate() {
        let kept = corpus(target);
        assert!(!kept.is_empty(), "{} has no corpus", target.name);
        let mut random = ChaCha8Rng::seed_from_u64(seed as u64);
        for index in 0..inputs.max(kept.len()) {
            let mut input = kept[index % kept.len()].clone();
            if index >= kept.len() {
                change(&mut input, &kept, &mut random);
            }
            let ended = catch_unwind(|| (target.run)(&input));
            assert!(ended.is_ok(), "{} panics on {input:?}", target.name);
        }
    }
}
