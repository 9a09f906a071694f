//! Any bytes: a fault that encodes back to them, or an error.
#![no_main]

use farwire_proto::Fault;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(fault) = Fault::decode(bytes) {
        assert_eq!(fault.encode(), *bytes);
        let _ = fault.to_string();
    }
});
