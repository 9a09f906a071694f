#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| farwire_fuzz::run("training", bytes));
