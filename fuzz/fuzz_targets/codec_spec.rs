//! Any text: a codec that prints and parses to itself, or an error.
#![no_main]

use farwire_codec::CodecSpec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(spec) = text.parse::<CodecSpec>() {
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }
});
