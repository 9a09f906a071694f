//! Codecs by name: what people type, and what ranks compare.

use std::any::Any;
use std::fmt;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;

use crate::codec::{Codec, MessageCodec, Travel};
use crate::codecs::CODECS;
use crate::codecs::identity::Identity;
use crate::codecs::powersgd::Shape;

/// A codec with its parameters, one of this crate or [your own](Self::custom).
///
/// ```
/// use farwire_codec::CodecSpec;
///
/// let spec: CodecSpec = "topk:0.01,values=int8".parse().unwrap();
/// assert_eq!(spec.to_string(), "topk:0.01,values=int8");
/// assert!("topk:1.5".parse::<CodecSpec>().unwrap_err().to_string().contains("fraction"));
/// ```
#[derive(Clone, Debug)]
pub struct CodecSpec(Arc<dyn Codec>);

impl CodecSpec {
    /// The spec of this codec.
    pub fn new(codec: impl Codec) -> Self {
        Self(Arc::new(codec))
    }

    /// No compression: `none`.
    pub fn none() -> Self {
        Self::new(Identity)
    }

    /// Whether vectors stay as they are.
    pub fn is_none(&self) -> bool {
        let codec: &dyn Any = &*self.0;
        codec.is::<Identity>()
    }

    /// How a vector travels, and what encodes it.
    pub fn travels(&self) -> Travel {
        self.0.clone().travels()
    }

    /// What makes its messages; `None` if it sums factors and has no messages.
    pub fn messages(&self) -> Option<Arc<dyn MessageCodec>> {
        match self.travels() {
            Travel::Shards(codec) | Travel::Whole(codec) => Some(codec),
            Travel::Factors(_) => None,
        }
    }

    /// Bytes that a vector of this many elements usually takes.
    pub fn expected_len(&self, elements: usize) -> usize {
        match self.travels() {
            Travel::Shards(codec) | Travel::Whole(codec) => codec.expected_len(elements),
            Travel::Factors(codec) => {
                let (p, q) = codec.factor_lens(Shape::of(&[elements]));
                size_of::<f32>() * (p + q)
            }
        }
    }

    /// A 32-bit digest by which ranks compare their codecs: part of the protocol.
    pub fn id(&self) -> NonZeroU32 {
        if self.is_none() {
            return NonZeroU32::MIN;
        }
        // FNV-1a.
        let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let digest = self.name().bytes().fold(0x811c_9dc5, step);
        NonZeroU32::new(digest).unwrap_or(NonZeroU32::MIN)
    }

    /// A list of the named codecs, for `--help`.
    pub fn help() -> String {
        let mut text =
            "Codecs, and how many times smaller than f32 a vector of 16 Mi gets:\n".to_owned();
        for family in CODECS {
            text += &format!("  {}\n      {}:", family.forms, family.help);
            for name in family.typical {
                let spec: Self = name.parse().expect("the registry's samples parse");
                let ratio = (4 << 24) as f64 / spec.expected_len(1 << 24) as f64;
                text += &format!(" {name} {ratio:.0}×;");
            }
            text.pop();
            text.push('\n');
        }
        text
    }
}

impl Default for CodecSpec {
    fn default() -> Self {
        Self::none()
    }
}

impl Deref for CodecSpec {
    type Target = dyn Codec;

    fn deref(&self) -> &dyn Codec {
        &*self.0
    }
}

/// The same kind with the same parameters.
impl PartialEq for CodecSpec {
    fn eq(&self, other: &Self) -> bool {
        let (mine, theirs): (&dyn Any, &dyn Any) = (&*self.0, &*other.0);
        mine.type_id() == theirs.type_id() && self.name() == other.name()
    }
}

/// Prints the form that parses to the same codec.
impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// A text that names no codec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a codec: {why}; accepted: {}", forms())]
pub struct SpecError {
    given: String,
    why: String,
}

fn forms() -> String {
    CODECS.iter().map(|family| family.forms).collect::<Vec<_>>().join(", ")
}

impl FromStr for CodecSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse(text).map_err(|why| SpecError { given: text.into(), why })
    }
}

fn parse(text: &str) -> Result<CodecSpec, String> {
    let mut params = Params::new(text)?;
    let family = CODECS.iter().find(|family| family.names.contains(&params.name));
    let family = family.ok_or_else(|| format!("`{}` is unknown", params.name))?;
    let spec = (family.parse)(&mut params)?;
    params.finish()?;
    Ok(spec)
}

/// A codec's text, split up: `name:argument,key=value,key=value`. A parser takes the parts it
/// knows; any left over are an error.
#[derive(Debug)]
pub(crate) struct Params<'a> {
    pub(crate) name: &'a str,
    argument: Option<&'a str>,
    options: Vec<(&'a str, &'a str)>,
}

impl<'a> Params<'a> {
    fn new(text: &'a str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let head = parts.next().unwrap_or_default();
        let (name, argument) = match head.split_once(':') {
            Some((name, argument)) => (name, Some(argument)),
            None => (head, None),
        };
        let pairs = parts
            .map(|part| part.split_once('=').ok_or_else(|| format!("`{part}` is not key=value")));
        Ok(Self { name, argument, options: pairs.collect::<Result<_, _>>()? })
    }

    /// The text after the colon.
    pub(crate) fn argument(&mut self, example: &str) -> Result<&'a str, String> {
        let name = self.name;
        self.argument
            .take()
            .ok_or_else(|| format!("{name} needs {example}, as in {name}:{example}"))
    }

    /// The value of an option, if it is there.
    pub(crate) fn take(&mut self, key: &str) -> Option<&'a str> {
        let at = self.options.iter().position(|(k, _)| *k == key)?;
        Some(self.options.remove(at).1)
    }

    /// The value of an option that accepts a closed set of values.
    pub(crate) fn one_of<T: Copy>(
        &mut self,
        key: &str,
        values: &[(&str, T)],
    ) -> Result<Option<T>, String> {
        let Some(given) = self.take(key) else { return Ok(None) };
        match values.iter().find(|(name, _)| *name == given) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
                Err(format!("{key}={given} is none of {}", names.join(", ")))
            }
        }
    }

    fn finish(&self) -> Result<(), String> {
        let name = self.name;
        if self.argument.is_some() {
            return Err(format!("{name} takes nothing after a colon"));
        }
        match self.options.first() {
            Some((key, _)) => Err(format!("{name} has no option `{key}`, or it is given twice")),
            None => Ok(()),
        }
    }
}

/// A whole number of at least 1.
pub(crate) fn positive(what: &str, text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("the {what} `{text}` is not a whole number of at least 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codecs::samples;

    #[test]
    fn what_is_printed_parses_to_the_same() {
        for text in samples() {
            let spec: CodecSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
        }
        let long: CodecSpec = "int8,rotate=off,rounding=nearest,block=256".parse().unwrap();
        assert_eq!(long.to_string(), "int8");
        let long: CodecSpec = "topk:0.01,mode=global,values=bf16".parse().unwrap();
        assert_eq!(long.to_string(), "topk:0.01");
    }

    #[test]
    fn every_name_of_the_registry_has_a_typical_form_and_is_in_the_help() {
        let help = CodecSpec::help();
        for family in CODECS {
            assert!(help.contains(family.forms) && help.contains(family.help), "{family:?}");
            for name in family.names {
                let named = |text: &&&str| text.split([':', ',']).next() == Some(name);
                assert!(
                    family.typical.iter().any(|text| named(&text)),
                    "{name} is not in `typical`"
                );
                assert!(family.forms.contains(name), "{name} is not in `forms`");
                let also = CODECS.iter().filter(|other| other.names.contains(name)).count();
                assert_eq!(also, 1, "{name} is taken twice");
            }
        }
    }

    #[test]
    fn ids_tell_codecs_apart() {
        let ids: std::collections::BTreeSet<_> =
            samples().map(|text| text.parse::<CodecSpec>().unwrap().id()).collect();
        assert_eq!(ids.len(), samples().count());
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_accepted_forms() {
        let bad = "topk topk: topk:0 topk:-0.1 topk:1.01 topk:nan topk:inf topk:count=0 topk:5/4 \
            topk:0/4 topk:1/0 topk:0.1,values=f16 topk:0.1,mode topk:0.1,x=1 \
            topk:0.1,mode=union,mode=union randk:0.1,values=int8 randk:0.1,seed=-1 randk:64/4096 \
            int8:4 int8,block=100 int8,block=8 int8,rotate=yes sign,block=4 powersgd powersgd:0 \
            powersgd:x zip None";
        for text in bad.split(' ').chain(["", "bf16 "]) {
            let error = text.parse::<CodecSpec>().expect_err(text).to_string();
            assert!(error.contains("topk:0.01 | topk:count=1000"), "{error}");
        }
        // No codec accepts an option that it does not know.
        for text in samples() {
            assert!(format!("{text},zip=1").parse::<CodecSpec>().is_err(), "{text}");
            assert!(format!("{text}:0.5").parse::<CodecSpec>().is_err(), "{text}");
        }
    }
}
