//! Any bytes: saved error feedback that saves to something that loads, or an error.
#![no_main]

use farwire_codec::ErrorFeedback;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(feedback) = ErrorFeedback::from_bytes(bytes) {
        let saved = feedback.to_bytes();
        let again = ErrorFeedback::from_bytes(&saved).expect("what was saved");
        assert_eq!(again.to_bytes(), saved);
    }
});
