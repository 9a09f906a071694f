//! How a run phases its codec in.

use farwire::{CodecChoice, CodecSpec};

/// A codec that leaves much out does harm while a model still learns fast, so it is phased in.
///
/// ```text
///  density 1 ┤████████
///       0.25 ┤        ▇▇▇▇▆▆▅▅▄
///  codec's   ┤                 ▃▂▂▁▁▁▁▁▁▁▁▁▁▁▁
///            └─ dense ─┴── falling ──┴─ the rest of the run ─▶ steps
/// ```
///
/// Which codec a step uses depends only on the step, so a resumed run continues as if it had not
/// been interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseIn {
    /// Steps at the start in which nothing is compressed.
    pub dense: u64,
    /// Steps after them in which the density falls from a quarter to the codec's own.
    pub falling: u64,
}

/// The density after the dense steps.
const FIRST: f64 = 0.25;

impl PhaseIn {
    /// Phases that serve a run of `steps` steps well. A codec that trains like dense needs none.
    /// Others get an eighth of the run dense, and sparse ones three quarters to fall in.
    pub fn over(codec: impl Into<CodecChoice>, steps: u64) -> Self {
        let (CodecChoice::Given(codec) | CodecChoice::WhereFaster(codec)) = codec.into() else {
            return Self::default();
        };
        if codec.trains_like_dense() {
            return Self::default();
        }
        let is_sparse = codec.with_density(1.0).is_some();
        Self { dense: steps / 8, falling: if is_sparse { steps * 3 / 4 } else { 0 } }
    }

    /// The codec for a tensor of `elements` in a step, when the run is to end up with `codec`.
    pub fn codec_at(self, step: u64, codec: CodecSpec, elements: usize) -> CodecSpec {
        if step < self.dense {
            return CodecSpec::none();
        }
        let (after, last) = (step - self.dense, codec.density(elements));
        if after >= self.falling || last >= FIRST {
            return codec;
        }
        // Slowly at first: losses fall fastest early in a run.
        let fallen = (after as f64 / self.falling as f64).powi(3);
        codec.with_density(FIRST * (last / FIRST).powf(fallen)).unwrap_or(codec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn densities(phase_in: PhaseIn, codec: &str, elements: usize, steps: u64) -> Vec<f64> {
        let codec: CodecSpec = codec.parse().unwrap();
        (0..steps)
            .map(|step| phase_in.codec_at(step, codec.clone(), elements).density(elements))
            .collect()
    }

    #[test]
    fn density_is_one_then_falls_to_the_codecs_own() {
        for codec in
            ["topk:0.01", "topk:count=100", "topk:41/4096", "randk:0.01", "topk:0.01,mode=union"]
        {
            let seen = densities(PhaseIn { dense: 5, falling: 20 }, codec, 10_000, 40);
            assert_eq!(seen[..5], [1.0; 5], "{codec}");
            assert!((seen[5] - FIRST).abs() < 1e-3, "{codec}");
            assert!(seen.windows(2).all(|pair| pair[0] >= pair[1]), "{codec}: {seen:?}");
            assert!(
                seen[25..].iter().all(|density| (density - 0.01).abs() < 1e-4),
                "{codec}: {seen:?}"
            );
        }
    }

    #[test]
    fn what_leaves_nothing_out_only_waits() {
        for codec in farwire::codec::samples().chain(["topk:0.5"]) {
            let wanted: CodecSpec = codec.parse().unwrap();
            if wanted.density(100) < FIRST {
                continue;
            }
            let phase_in = PhaseIn { dense: 2, falling: 9 };
            let seen: Vec<_> =
                (0..5).map(|step| phase_in.codec_at(step, wanted.clone(), 100)).collect();
            let none = CodecSpec::none;
            assert_eq!(seen, [none(), none(), wanted.clone(), wanted.clone(), wanted]);
        }
    }

    #[test]
    fn nothing_is_phased_in_unless_asked_for() {
        let wanted: CodecSpec = "topk:0.01".parse().unwrap();
        assert_eq!(PhaseIn::default().codec_at(0, wanted.clone(), 1000), wanted);
        // The default for a run ends before the run does.
        for steps in [1, 2, 7, 30, 300, 1_000_000] {
            let PhaseIn { dense, falling } = PhaseIn::over(wanted.clone(), steps);
            assert!(dense + falling < steps, "{steps}");
        }
        assert_eq!(PhaseIn::over(CodecChoice::Auto, 300), PhaseIn::default());
        assert_eq!(PhaseIn::over("int8".parse::<CodecSpec>().unwrap(), 300), PhaseIn::default());
    }
}
