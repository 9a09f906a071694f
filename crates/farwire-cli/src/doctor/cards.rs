//! What GPUs there are, and what is needed to use them.

use std::io::Write;

use farwire_cuda::bench::copy_speed;
use farwire_cuda::{Device, cards, nvrtc_version};

/// Prints what there is, a line each.
pub(super) fn examine(out: &mut impl Write) -> std::io::Result<()> {
    let cards = match cards() {
        Ok(cards) => cards,
        Err(error) => return writeln!(out, "ok      GPU: none; {error}"),
    };
    for card in cards {
        let (major, minor) = card.compute_capability;
        let (cuda, update) = card.driver;
        let gib = card.memory as f64 / (1u64 << 30) as f64;
        let copies = match Device::new(card.ordinal).and_then(|device| copy_speed(&device)) {
            Ok((to_host, to_card)) => {
                format!(
                    "pinned copies {to_host:.1} GB/s to the host, {to_card:.1} GB/s to the card"
                )
            }
            Err(error) => error.to_string(),
        };
        writeln!(
            out,
            "ok      GPU {}: {}, {gib:.0} GiB, compute capability {major}.{minor}, \
             driver for CUDA {cuda}.{update}; {copies}",
            card.ordinal, card.name
        )?;
    }
    match nvrtc_version() {
        Some((major, minor)) => writeln!(out, "ok      NVRTC: {major}.{minor}"),
        None => writeln!(
            out,
            "broken  NVRTC: kernels cannot be compiled\n        install the CUDA toolkit, or \
             `pip install nvidia-cuda-nvrtc`, and put its folder into LD_LIBRARY_PATH"
        ),
    }
}
