//! Targets for what a process reads from its peers, its files and its command line.

use std::io;

use aws_lc_rs::digest;
use farwire::flight::Flight;
use farwire_netlab::units as numbers;

/// Any bytes as what another process says while it joins.
pub(crate) fn joining(bytes: &[u8]) {
    farwire::read_anything(bytes);
}

/// Any bytes as the record of a rank that failed.
pub(crate) fn flight(bytes: &[u8]) {
    if let Ok(flight) = serde_json::from_slice::<Flight>(bytes) {
        let _ = flight.to_json();
    }
}

/// Any bytes as the files of a checkpoint whose hashes are right: the text about it up to the first
/// zero byte, then the contents of each file of the model's and the optimizer's tensors.
pub(crate) fn checkpoint(bytes: &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (about, tensors) = (&bytes[..end], &bytes[(end + 1).min(bytes.len())..]);
    const TENSORS: [&str; 2] = ["model.safetensors", "optimizer.safetensors"];
    const RESIDUALS: &str = "residuals.rank0.safetensors";
    let contents = |name: &str| match name {
        "job.json" => Some(about),
        name if TENSORS.contains(&name) => Some(tensors),
        RESIDUALS => Some(&b""[..]),
        _ => None,
    };
    let file = |name: &str| {
        if name != "SHA256SUMS" {
            return contents(name).map(<[u8]>::to_vec).ok_or(io::ErrorKind::NotFound.into());
        }
        let names = ["job.json", TENSORS[0], TENSORS[1], RESIDUALS];
        let line = |name: &str| {
            let sum = digest::digest(&digest::SHA256, contents(name).unwrap_or_default());
            let sum: String = sum.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{sum}  {name}\n")
        };
        Ok(names.map(line).concat().into_bytes())
    };
    if let Ok(about) = farwire_train::checkpoint_of(&file) {
        let _ = (about.name(), about.settings.check());
    }
}

/// Any bytes as what ranks tell each other in training: tensors to come, what is not finite, what
/// each has when the group has changed.
pub(crate) fn training(bytes: &[u8]) {
    farwire_train::read_anything(bytes);
}

/// Any text as a size, a rate, a time or a share.
pub(crate) fn units(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(rate) = numbers::rate(text) {
        assert!(rate.is_finite() && rate > 0.0);
    }
    if let Ok(share) = numbers::share(text) {
        assert!((0.0..=0.9).contains(&share));
    }
    let _ = (numbers::size(text), numbers::time(text));
}
