//! Which codec a vector takes, by its length.

use std::fmt;
use std::str::FromStr;

use farwire_codec::{CodecSpec, SpecError};
use farwire_proto::DType;

/// A codec counts as faster than dense if dense takes this many times as long. Less is noise, and
/// not worth an approximation.
pub(crate) const MARGIN: f64 = 1.2;

/// What people ask for: a codec, or one that is chosen by measuring.
///
/// ```
/// use farwire::CodecChoice;
///
/// assert_eq!("auto".parse::<CodecChoice>().unwrap(), CodecChoice::Auto);
/// let sparse: CodecChoice = "auto:topk:0.01".parse().unwrap();
/// assert_eq!(sparse, CodecChoice::WhereFaster("topk:0.01".parse().unwrap()));
/// assert_eq!("int8".parse::<CodecChoice>().unwrap(), CodecChoice::Given("int8".parse().unwrap()));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum CodecChoice {
    /// `int8`: this codec, for vectors of any length.
    Given(CodecSpec),
    /// `auto`: bf16 or int8, which train like dense, each where it is faster, and dense elsewhere.
    Auto,
    /// `auto:topk:0.01`: this codec where it is faster, and dense elsewhere.
    WhereFaster(CodecSpec),
}

impl Default for CodecChoice {
    fn default() -> Self {
        Self::Given(CodecSpec::default())
    }
}

impl From<CodecSpec> for CodecChoice {
    fn from(codec: CodecSpec) -> Self {
        Self::Given(codec)
    }
}

/// Prints the form that parses to the same.
impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given(codec) => write!(f, "{codec}"),
            Self::Auto => f.write_str("auto"),
            Self::WhereFaster(codec) => write!(f, "auto:{codec}"),
        }
    }
}

/// A text that is neither a codec nor `auto`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0}; auto (bf16 or int8 where that is faster), auto:topk:0.01 (any codec, where it is faster)"
)]
pub struct ChoiceError(SpecError);

impl From<SpecError> for ChoiceError {
    fn from(error: SpecError) -> Self {
        Self(error)
    }
}

impl FromStr for CodecChoice {
    type Err = ChoiceError;

    fn from_str(text: &str) -> Result<Self, ChoiceError> {
        match text.split_once(':') {
            _ if text == "auto" => Ok(Self::Auto),
            Some(("auto", codec)) => Ok(Self::WhereFaster(codec.parse()?)),
            _ => Ok(Self::Given(text.parse()?)),
        }
    }
}

/// Which codec a vector takes, by its length. It is made from a [`CodecSpec`], which then serves
/// any length, or by measuring: [`CodecChoice::settle`].
///
/// ```
/// use farwire::{CodecPolicy, DType};
///
/// let policy: CodecPolicy = "bf16 from 16 KiB (1.3×); int8 from 1024 KiB (3.6×)".parse().unwrap();
/// assert_eq!(policy.codec_for(1000, DType::F32).to_string(), "none");
/// assert_eq!(policy.codec_for(5000, DType::F32).to_string(), "bf16");
/// assert_eq!(policy.codec_for(1 << 20, DType::F32).to_string(), "int8");
/// // A dense vector of 16-bit floats is half as long, so less is won.
/// assert_eq!(policy.codec_for(5000, DType::Bf16).to_string(), "none");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CodecPolicy {
    /// Ascending; below the first, dense.
    steps: Vec<Step>,
}

/// A codec, and the length from which it is used.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    /// Elements of the shortest vector.
    pub(crate) from: usize,
    pub(crate) codec: CodecSpec,
    /// For vectors of f32, dense takes at least this many times as long; not finite if that was not
    /// measured.
    pub(crate) gain: f64,
}

impl CodecPolicy {
    /// Steps in ascending order.
    pub(crate) fn new(steps: Vec<Step>) -> Self {
        debug_assert!(steps.is_sorted_by(|a, b| a.from < b.from), "{steps:?}");
        Self { steps }
    }

    /// The codec for a vector of this many elements; in an all-gather, of all ranks' elements
    /// together.
    pub fn codec_for(&self, elements: usize, dtype: DType) -> CodecSpec {
        // A dense vector with half the bytes takes at least half the time, while the codec sees as
        // many elements.
        let share = (dtype.size() as f64 / size_of::<f32>() as f64).min(1.0);
        match self.steps.iter().rfind(|step| step.from <= elements) {
            Some(step) if step.gain * share >= MARGIN => step.codec.clone(),
            _ => CodecSpec::none(),
        }
    }

    /// Whether no vector takes a codec.
    pub fn is_dense(&self) -> bool {
        self.steps.is_empty()
    }
}

impl From<CodecSpec> for CodecPolicy {
    fn from(codec: CodecSpec) -> Self {
        if codec.is_none() {
            return Self::default();
        }
        Self::new(vec![Step { from: 0, codec, gain: f64::INFINITY }])
    }
}

/// Elements of f32 in a KiB.
const KIB: usize = 1024 / size_of::<f32>();

/// Prints the form that parses to the same. Lengths are those of vectors of f32; in brackets is how
/// many times as long dense took.
impl fmt::Display for CodecPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.steps.is_empty() {
            return f.write_str("none");
        }
        for (index, Step { from, codec, gain }) in self.steps.iter().enumerate() {
            f.write_str(if index > 0 { "; " } else { "" })?;
            match gain.is_finite() {
                false => write!(f, "{codec}")?,
                true => write!(f, "{codec} from {} KiB ({gain}×)", from / KIB)?,
            }
        }
        Ok(())
    }
}

/// A text that is not a codec policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a codec policy; write a codec, or a list such as `bf16 from 16 KiB (1.3×); int8 from 256 KiB (2.5×)`"
)]
pub struct PolicyError(String);

impl FromStr for CodecPolicy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        if let Ok(codec) = text.parse::<CodecSpec>() {
            return Ok(codec.into());
        }
        let step = |text: &str| -> Option<Step> {
            let (codec, rest) = text.split_once(" from ")?;
            let (kib, rest) = rest.split_once(" KiB (")?;
            let gain: f64 = rest.strip_suffix("×)")?.parse().ok()?;
            let from = kib.parse::<usize>().ok()?.checked_mul(KIB)?;
            gain.is_finite().then_some(Step { from, codec: codec.parse().ok()?, gain })
        };
        let steps: Option<Vec<Step>> = text.split("; ").map(step).collect();
        let steps = steps.filter(|steps| steps.is_sorted_by(|a, b| a.from < b.from));
        steps.map(Self::new).ok_or_else(|| PolicyError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_parses_to_the_same() {
        for text in ["auto", "auto:topk:0.01,values=int8", "none", "int8,block=64"] {
            assert_eq!(text.parse::<CodecChoice>().unwrap().to_string(), text);
        }
        for text in [
            "none",
            "topk:0.01",
            "topk:0.01,values=int8 from 4 KiB (1.2×); int8 from 16384 KiB (3.07×)",
        ] {
            assert_eq!(text.parse::<CodecPolicy>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_accepted_forms() {
        for text in
            ["", "Auto", "auto:", "auto:auto", "auto:zip", "auto,int8", "automatic", "auto "]
        {
            let error = text.parse::<CodecChoice>().expect_err(text).to_string();
            assert!(
                error.contains("accepted: none, bf16") && error.contains("auto:topk:0.01"),
                "{error}"
            );
        }
        for text in [
            "",
            "zip",
            "int8 from 4 KiB",
            "int8 from x KiB (2×)",
            "int8 from 4 KiB (inf×)",
            "zip from 4 KiB (2×)",
            "int8 from 18446744073709551615 KiB (2×)",
            "int8 from 4 KiB (2×); bf16 from 4 KiB (2×)",
        ] {
            let error = text.parse::<CodecPolicy>().expect_err(text).to_string();
            assert!(error.contains("write a codec, or a list such as"), "{error}");
        }
    }

    #[test]
    fn a_given_codec_serves_every_length_and_type() {
        let policy = CodecPolicy::from("int8".parse::<CodecSpec>().unwrap());
        for dtype in [DType::F64, DType::F32, DType::Bf16] {
            assert_eq!(policy.codec_for(0, dtype).to_string(), "int8");
        }
        assert!(CodecPolicy::from(CodecSpec::none()).is_dense());
    }
}
