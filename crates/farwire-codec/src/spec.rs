//! Codecs by name: what people type, and what ranks compare.

use std::fmt;
use std::str::FromStr;

use crate::block::{BlockQuantiser, Format, Rounding};
use crate::cast::Cast;
use crate::identity::Identity;
use crate::job::MessageCodec;
use crate::kept::ValueCoding;
use crate::powersgd::PowerSgd;
use crate::randk::RandomK;
use crate::sign::Sign;
use crate::topk::{Keep, OwnerMode, Share, TopK};

/// A codec and its options.
///
/// ```
/// use farwire_codec::CodecSpec;
///
/// let spec: CodecSpec = "topk:0.01,values=int8".parse().unwrap();
/// assert_eq!(spec.to_string(), "topk:0.01,values=int8");
/// assert!("topk:1.5".parse::<CodecSpec>().unwrap_err().to_string().contains("fraction"));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum CodecSpec {
    /// `none`: f32 as it is.
    #[default]
    None,
    /// `bf16` or `f16`.
    Cast(Cast),
    /// `topk:…`.
    TopK(TopK),
    /// `randk:…`.
    RandomK(RandomK),
    /// `int8`, `int4` or `fp8`.
    Block(BlockQuantiser),
    /// `sign`.
    Sign,
    /// `powersgd:…`.
    PowerSgd(PowerSgd),
}

/// How a codec travels.
#[derive(Debug)]
pub enum Plan {
    /// In messages: shards to their owners, sums to everybody.
    Partitioned(Box<dyn MessageCodec>),
    /// As two factors, each summed by an allreduce of f32.
    LowRank(PowerSgd),
}

impl CodecSpec {
    /// The forms that parse, for help texts and errors.
    pub const FORMS: &'static str = "none, bf16, f16, \
        topk:0.01 | topk:count=1000 | topk:64/4096 [,values=f32|bf16|int8] [,mode=global|union], \
        randk:0.01 | randk:count=1000 [,values=f32|bf16] [,seed=7], \
        int8 | int4 | fp8 [,block=256] [,rounding=nearest|stochastic] [,rotate=on|off], \
        sign, powersgd:4";

    /// The codec itself.
    pub fn plan(&self) -> Plan {
        Plan::Partitioned(match *self {
            Self::None => Box::new(Identity),
            Self::Cast(cast) => Box::new(cast),
            Self::TopK(topk) => Box::new(topk),
            Self::RandomK(randk) => Box::new(randk),
            Self::Block(block) => Box::new(block),
            Self::Sign => Box::new(Sign),
            Self::PowerSgd(powersgd) => return Plan::LowRank(powersgd),
        })
    }

    /// 32 bits by which ranks compare their codecs: zero for `none` alone.
    pub fn id(&self) -> u32 {
        if *self == Self::None { 0 } else { digest(&self.to_string()) }
    }

    /// The share of a vector's elements that one message brings news of: 1 unless the codec leaves elements out.
    pub fn density(&self, elements: usize) -> f64 {
        let of = |kept: usize, all: usize| kept as f64 / all.max(1) as f64;
        match self {
            Self::TopK(TopK { keep: Keep::Whole(share), .. })
            | Self::RandomK(RandomK { keep: share, .. }) => of(share.of(elements), elements),
            Self::TopK(TopK { keep: Keep::PerChunk { keep, chunk }, .. }) => of(*keep, *chunk),
            _ => 1.0,
        }
    }

    /// The same codec with another density, in (0, 1]; nothing changes if it leaves no elements out.
    #[must_use]
    pub fn with_density(self, density: f64) -> Self {
        let share = Share::Fraction(density.clamp(f64::MIN_POSITIVE, 1.0));
        match self {
            Self::TopK(topk) => {
                let keep = match topk.keep {
                    Keep::Whole(_) => Keep::Whole(share),
                    Keep::PerChunk { chunk, .. } => Keep::PerChunk { keep: share.of(chunk), chunk },
                };
                Self::TopK(TopK { keep, ..topk })
            }
            Self::RandomK(randk) => Self::RandomK(RandomK { keep: share, ..randk }),
            other => other,
        }
    }

    /// Whether results suffer badly without error feedback.
    pub fn needs_feedback(&self) -> bool {
        matches!(self, Self::TopK(_) | Self::Sign | Self::PowerSgd(_))
    }
}

/// 32 bits, not zero, that differ for different names but for bad luck (FNV-1a).
pub(crate) fn digest(name: &str) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    name.bytes().fold(0x811c_9dc5, step).max(1)
}

/// Prints the form that parses to the same; options that are at their default are left out.
impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Cast(Cast::Bf16) => f.write_str("bf16"),
            Self::Cast(Cast::F16) => f.write_str("f16"),
            Self::TopK(TopK { keep, values, mode }) => {
                match keep {
                    Keep::Whole(share) => write!(f, "topk:{share}")?,
                    Keep::PerChunk { keep, chunk } => write!(f, "topk:{keep}/{chunk}")?,
                }
                if *values != ValueCoding::default() {
                    write!(f, ",values={}", values.name())?;
                }
                if *mode == OwnerMode::Union {
                    f.write_str(",mode=union")?;
                }
                Ok(())
            }
            Self::RandomK(RandomK { keep, bf16, seed }) => {
                write!(f, "randk:{keep}")?;
                if !bf16 {
                    f.write_str(",values=f32")?;
                }
                seed.map_or(Ok(()), |seed| write!(f, ",seed={seed}"))
            }
            Self::Block(block) => {
                let plain = BlockQuantiser::new(block.format);
                f.write_str(match block.format {
                    Format::Int8 => "int8",
                    Format::Int4 => "int4",
                    Format::Fp8 => "fp8",
                })?;
                if block.block != plain.block {
                    write!(f, ",block={}", block.block)?;
                }
                if block.rounding == Rounding::Stochastic {
                    f.write_str(",rounding=stochastic")?;
                }
                if block.rotate {
                    f.write_str(",rotate=on")?;
                }
                Ok(())
            }
            Self::Sign => f.write_str("sign"),
            Self::PowerSgd(PowerSgd { rank }) => write!(f, "powersgd:{rank}"),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fraction(fraction) => write!(f, "{fraction}"),
            Self::Count(count) => write!(f, "count={count}"),
        }
    }
}

/// A text that names no codec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a codec: {why}; accepted: {}", CodecSpec::FORMS)]
pub struct SpecError {
    given: String,
    why: String,
}

impl FromStr for CodecSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse(text).map_err(|why| SpecError { given: text.into(), why })
    }
}

fn parse(text: &str) -> Result<CodecSpec, String> {
    let mut parts = text.split(',');
    let head = parts.next().unwrap_or_default();
    let (name, argument) = match head.split_once(':') {
        Some((name, argument)) => (name, Some(argument)),
        None => (head, None),
    };
    let mut options = Options::new(parts)?;
    let argument = |what: &str| argument.ok_or_else(|| format!("{name} needs {what}, as in {name}:{what}"));
    let spec = match name {
        "topk" => {
            let argument = argument("0.01")?;
            let keep = match argument.split_once('/') {
                Some((keep, chunk)) => {
                    let (keep, chunk) = (positive("count", keep)?, positive("chunk", chunk)?);
                    if keep > chunk {
                        return Err(format!("{keep} of {chunk} are too many"));
                    }
                    Keep::PerChunk { keep, chunk }
                }
                None => Keep::Whole(share(argument)?),
            };
            let codings = [ValueCoding::F32, ValueCoding::Bf16, ValueCoding::Int8];
            let values = options.one_of("values", &codings.map(|coding| (coding.name(), coding)))?;
            let mode =
                options.one_of("mode", &[("global", OwnerMode::Global), ("union", OwnerMode::Union)])?;
            CodecSpec::TopK(TopK { keep, values: values.unwrap_or_default(), mode: mode.unwrap_or_default() })
        }
        "randk" => {
            let keep = share(argument("0.01")?)?;
            let bf16 = options.one_of("values", &[("f32", false), ("bf16", true)])?.unwrap_or(true);
            let seed = options.take("seed").map(|seed| {
                seed.parse().map_err(|_| format!("seed={seed} is not a whole number below 2^64"))
            });
            CodecSpec::RandomK(RandomK { keep, bf16, seed: seed.transpose()? })
        }
        "powersgd" => CodecSpec::PowerSgd(PowerSgd { rank: positive("rank", argument("4")?)? }),
        _ => {
            let spec = match name {
                "none" => CodecSpec::None,
                "bf16" => CodecSpec::Cast(Cast::Bf16),
                "f16" => CodecSpec::Cast(Cast::F16),
                "int8" => CodecSpec::Block(BlockQuantiser::new(Format::Int8)),
                "int4" => CodecSpec::Block(BlockQuantiser::new(Format::Int4)),
                "fp8" => CodecSpec::Block(BlockQuantiser::new(Format::Fp8)),
                "sign" => CodecSpec::Sign,
                _ => return Err(format!("`{name}` is unknown")),
            };
            if head.contains(':') {
                return Err(format!("{name} takes nothing after a colon"));
            }
            match spec {
                CodecSpec::Block(block) => CodecSpec::Block(block_options(block, &mut options)?),
                other => other,
            }
        }
    };
    options.finish(name)?;
    Ok(spec)
}

fn block_options(mut block: BlockQuantiser, options: &mut Options<'_>) -> Result<BlockQuantiser, String> {
    if let Some(given) = options.take("block") {
        block.block = positive("block", given)?;
        if !block.block.is_power_of_two() || !BlockQuantiser::BLOCKS.contains(&block.block) {
            return Err(format!("block={given} is not a power of two from 16 to 65536"));
        }
    }
    let roundings = [("nearest", Rounding::Nearest), ("stochastic", Rounding::Stochastic)];
    block.rounding = options.one_of("rounding", &roundings)?.unwrap_or_default();
    block.rotate = options.one_of("rotate", &[("on", true), ("off", false)])?.unwrap_or_default();
    Ok(block)
}

fn share(text: &str) -> Result<Share, String> {
    if let Some(count) = text.strip_prefix("count=") {
        return Ok(Share::Count(positive("count", count)?));
    }
    match text.parse() {
        Ok(fraction) if fraction > 0.0 && fraction <= 1.0 => Ok(Share::Fraction(fraction)),
        _ => Err(format!("`{text}` is not a fraction above 0 and at most 1")),
    }
}

fn positive(what: &str, text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("the {what} `{text}` is not a whole number of at least 1")),
    }
}

/// The `key=value` parts of a text that were not used yet.
struct Options<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Options<'a> {
    fn new(parts: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        let pairs =
            parts.map(|part| part.split_once('=').ok_or_else(|| format!("`{part}` is not key=value")));
        Ok(Self(pairs.collect::<Result<_, _>>()?))
    }

    fn take(&mut self, key: &str) -> Option<&'a str> {
        let at = self.0.iter().position(|(k, _)| *k == key)?;
        Some(self.0.remove(at).1)
    }

    fn one_of<T: Copy>(&mut self, key: &str, values: &[(&str, T)]) -> Result<Option<T>, String> {
        let Some(given) = self.take(key) else { return Ok(None) };
        match values.iter().find(|(name, _)| *name == given) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
                Err(format!("{key}={given} is none of {}", names.join(", ")))
            }
        }
    }

    fn finish(&self, name: &str) -> Result<(), String> {
        match self.0.first() {
            Some((key, _)) => Err(format!("{name} has no option `{key}`, or it is given twice")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: [&str; 18] = [
        "none",
        "bf16",
        "f16",
        "topk:0.01",
        "topk:0.01,values=f32",
        "topk:count=1000,values=int8,mode=union",
        "topk:64/4096,values=int8",
        "topk:1",
        "randk:0.01",
        "randk:0.001,values=f32,seed=18446744073709551615",
        "randk:count=5",
        "int8",
        "int4,block=1024,rounding=stochastic,rotate=on",
        "int4,rotate=on",
        "fp8",
        "fp8,block=16",
        "sign",
        "powersgd:4",
    ];

    #[test]
    fn what_is_printed_parses_to_the_same() {
        for text in GOOD {
            let spec: CodecSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
        }
        let long: CodecSpec = "int8,rotate=off,rounding=nearest,block=256".parse().unwrap();
        assert_eq!(long.to_string(), "int8");
        let long: CodecSpec = "topk:0.01,mode=global,values=bf16".parse().unwrap();
        assert_eq!(long.to_string(), "topk:0.01");
    }

    #[test]
    fn ids_tell_codecs_apart() {
        let ids: std::collections::BTreeSet<_> =
            GOOD.iter().map(|text| text.parse::<CodecSpec>().unwrap().id()).collect();
        assert_eq!(ids.len(), GOOD.len());
        assert_eq!(CodecSpec::None.id(), 0);
        // Other versions must agree: this is part of the protocol.
        assert_eq!("topk:0.01".parse::<CodecSpec>().unwrap().id(), digest("topk:0.01"));
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_accepted_forms() {
        let bad = [
            "",
            "topk",
            "topk:",
            "topk:0",
            "topk:-0.1",
            "topk:1.01",
            "topk:nan",
            "topk:inf",
            "topk:count=0",
            "topk:5/4",
            "topk:0/4",
            "topk:1/0",
            "topk:0.1,values=f16",
            "topk:0.1,mode",
            "topk:0.1,x=1",
            "topk:0.1,mode=union,mode=union",
            "randk:0.1,values=int8",
            "randk:0.1,seed=-1",
            "randk:64/4096",
            "int8:4",
            "int8,block=100",
            "int8,block=8",
            "int8,rotate=yes",
            "sign,block=4",
            "powersgd",
            "powersgd:0",
            "powersgd:x",
            "zip",
            "None",
            "bf16 ",
        ];
        for text in bad {
            let error = text.parse::<CodecSpec>().expect_err(text).to_string();
            assert!(error.contains("topk:0.01 | topk:count=1000"), "{error}");
        }
    }
}
