//! Measures memory on the card. A program of its own, so that nothing else allocates.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use farwire_codec::*;
use farwire_cuda::*;

#[test]
fn memory_on_the_card_is_flat_after_the_first_steps() {
    let device = match Device::new(0) {
        Ok(device) => device,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let len = (1 << 22) + 3;
    let values: Vec<f32> = (0..len).map(|i| (i * 37 % 1001) as f32 - 500.0).collect();
    let gradient = device.upload(&values).unwrap();
    let mut acc = device.zeros::<f32>(len).unwrap();
    for name in ["int8", "int4,rotate=on", "sign", "topk:0.01", "topk:64/4096", "randk:0.01"] {
        let codec = DeviceCodec::new(&device, &name.parse().unwrap()).unwrap();
        let mut out = DeviceEncoded::new(&device).unwrap();
        let mut inbox = Inbox::new(&device).unwrap();
        let mut owed = device.zeros::<f32>(len).unwrap();
        let mut free = Vec::new();
        for step in 1..=1000 {
            let context = Context { seed: 1, step, tensor: 2 };
            let place = CodedPlace::whole(context, len);
            let job = DeviceJob {
                values: gradient.values(),
                residual: DeviceResidual::Owed(&owed),
                place: place.clone(),
                role: Role::Worker,
                rank: 0,
                shards: std::slice::from_ref(&place.range),
            };
            codec.encode(&job, &mut out).unwrap();
            out.swap_residual(&mut owed);
            inbox.copy_from(out.message(0)).unwrap();
            codec.add_decoded(&mut inbox, &place, (&mut acc).into()).unwrap();
            if [10, 100, 1000].contains(&step) {
                free.push(device.memory().unwrap().0);
            }
        }
        eprintln!("{name}: bytes free after 10, 100, 1,000 steps: {free:?}");
        // Messages of sparse codecs may still grow a little after ten steps.
        let lost = free[0].saturating_sub(free[2]);
        assert!(lost <= 4 << 20, "{name}: {lost} bytes were lost in 990 steps: {free:?}");
    }
}
