//! Any bytes: a header that encodes back to them, or an error.
#![no_main]

use farwire_proto::{HEADER_LEN, Header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = Header::decode(bytes) {
        assert_eq!(header.encode(), bytes[..HEADER_LEN]);
        let _ = header.fingerprint.to_string();
    }
});
