//! Any bytes at any decoder: an error or a result. The first byte picks the codec, the second the
//! length.
#![no_main]

use farwire_codec::{CodecSpec, CodedPlace, Context, samples};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let [codec, len, bytes @ ..] = bytes else { return };
    let name = samples().nth(usize::from(*codec) % samples().count()).expect("there are so many");
    let spec: CodecSpec = name.parse().expect("the registry's samples parse");
    let Some(codec) = spec.messages() else { return };
    let len = usize::from(*len) * 9;
    let whole = CodedPlace::whole(Context::default(), 3 * len);
    let (mut zeros, mut dirty) = (vec![0.0; len], vec![f32::NAN; len]);
    let added = codec.add_decoded_into(bytes, &whole.part(len..2 * len), &mut zeros);
    assert_eq!(codec.decode_into(bytes, &whole.part(len..2 * len), &mut dirty), added);
    assert!(added.is_err() || zeros == dirty);
});
