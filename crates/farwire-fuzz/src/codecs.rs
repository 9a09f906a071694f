//! Targets for what codecs read.

use farwire_codec::{
    CodecSpec, CodedPlace, Context, Encoded, ErrorFeedback, Job, Residual, samples,
};

/// Any bytes at any decoder: an error or a result. The first byte picks the codec, the second the
/// length.
pub(crate) fn codec(bytes: &[u8]) {
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
}

/// Any text: a codec whose text parses to it again, or an error.
pub(crate) fn spec(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(spec) = text.parse::<CodecSpec>() {
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }
}

/// Any bytes as a top-k message: an error, or a vector that, encoded again, decodes to the same.
pub(crate) fn sparse(bytes: &[u8]) {
    let spec: CodecSpec = "topk:1,values=f32,mode=union".parse().expect("a codec");
    let codec = spec.messages().expect("top-k travels in messages");
    let place = CodedPlace::whole(Context::default(), 1 << 12);
    let mut acc = vec![0.0; 1 << 12];
    if codec.add_decoded_into(bytes, &place, &mut acc).is_ok() {
        let mut out = Encoded::default();
        let job = Job::owner(&acc, Residual::Zero, &place);
        codec.encode(&job, &mut out).expect("decoders refuse what is not finite");
        let mut again = vec![0.0; 1 << 12];
        codec.add_decoded_into(&out.messages[0], &place, &mut again).expect("its own message");
        assert_eq!(acc, again);
    }
}

/// Any bytes as saved error feedback: if it loads, what it saves loads again and saves to the same.
pub(crate) fn feedback(bytes: &[u8]) {
    if let Ok(feedback) = ErrorFeedback::from_bytes(bytes) {
        let saved = feedback.to_bytes();
        let again = ErrorFeedback::from_bytes(&saved).expect("what was saved");
        assert_eq!(again.to_bytes(), saved);
    }
}
