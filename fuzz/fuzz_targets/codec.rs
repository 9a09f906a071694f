//! Any bytes at any decoder: an error or a result. The first byte picks the codec, the second the length.
#![no_main]

use farwire_codec::{CodecSpec, Context, CodedPlace, Plan};
use libfuzzer_sys::fuzz_target;

const CODECS: [&str; 14] = [
    "none", "bf16", "f16", "topk:0.05", "topk:0.05,values=f32", "topk:0.05,values=int8", "topk:4/64", "randk:0.1", "randk:0.1,values=f32", "int8",
    "int4", "int4,rotate=on", "fp8", "sign",
];

fuzz_target!(|bytes: &[u8]| {
    let [codec, len, bytes @ ..] = bytes else { return };
    let name = CODECS[usize::from(*codec) % CODECS.len()];
    let Ok(Plan::Partitioned(codec)) = name.parse().map(|spec: CodecSpec| spec.plan()) else { unreachable!("they parse") };
    let len = usize::from(*len) * 9;
    let whole = CodedPlace::whole(Context::default(), 3 * len);
    let (mut zeros, mut dirty) = (vec![0.0; len], vec![f32::NAN; len]);
    let added = codec.add_decoded_into(bytes, &whole.part(len..2 * len), &mut zeros);
    assert_eq!(codec.decode_into(bytes, &whole.part(len..2 * len), &mut dirty), added);
    assert!(added.is_err() || zeros == dirty);
});
