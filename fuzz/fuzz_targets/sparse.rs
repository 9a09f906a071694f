//! Any bytes as a top-k message: an error, or a vector that, encoded again, decodes to the same.
#![no_main]

use farwire_codec::{CodecSpec, CodedPlace, Context, Encoded, Job, Residual};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let spec: CodecSpec = "topk:1,values=f32,mode=union".parse().expect("a codec");
    let codec = spec.messages().expect("top-k travels in messages");
    let place = CodedPlace::whole(Context::default(), 1 << 16);
    let mut acc = vec![0.0; 1 << 16];
    if codec.add_decoded_into(bytes, &place, &mut acc).is_ok() {
        let mut out = Encoded::default();
        codec.encode(&Job::owner(&acc, Residual::Zero, &place), &mut out).expect("decoders refuse what is not finite");
        let mut again = vec![0.0; 1 << 16];
        codec.add_decoded_into(&out.messages[0], &place, &mut again).expect("its own message");
        assert_eq!(acc, again);
    }
});
