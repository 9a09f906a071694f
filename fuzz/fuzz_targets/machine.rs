//! Any order of events at machines with operations of all kinds in flight, coded ones among them:
//! no panic, and every operation ends once.
#![no_main]

use farwire_sim::script;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let outcome = script::run(bytes);
    for end in outcome.ends.iter().flatten() {
        let end = end.as_ref().expect("every operation ends");
        assert!(outcome.trouble || end.is_ok());
    }
});
