//! How long each codec takes on the card: `codec_cuda [--elements N] [--repeats N] [CODEC…]`.

use farwire_codec::{CodecSpec, typical};
use farwire_cuda::{Device, DeviceCodec, bench};

const USAGE: &str = "codec_cuda [--elements 67108864] [--repeats 20] [CODEC…]";

fn main() {
    if let Err(error) = run() {
        eprintln!("codec_cuda: {error}\nusage: {USAGE}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let (mut elements, mut repeats, mut codecs) = (64 << 20, 20, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || -> Result<usize, Box<dyn std::error::Error>> {
            let text = arguments.next().ok_or("a number is missing")?;
            text.parse().map_err(|_| format!("`{text}` is not a number").into())
        };
        match argument.as_str() {
            "--elements" => elements = number()?,
            "--repeats" => repeats = number()?,
            codec => codecs.push(codec.parse::<CodecSpec>()?),
        }
    }
    if codecs.is_empty() {
        let all = typical().chain(["topk:64/4096"]).map(|name| name.parse::<CodecSpec>());
        codecs = all.collect::<Result<_, _>>()?;
        codecs.retain(|codec| DeviceCodec::supports(codec).is_ok());
    }
    let device = Device::new(0)?;
    for card in farwire_cuda::cards()? {
        println!("card {}: {}, CUDA {:?}", card.ordinal, card.name, card.driver);
    }
    let (to_host, to_card) = bench::copy_speed(&device)?;
    println!("pinned copies: {to_host:.1} GB/s to the host, {to_card:.1} GB/s to the card");
    println!(
        "{elements} f32 elements, medians of {repeats}; ms on the card; `of add`: r += g over it; \
         `host`: with the copy, by the host's clock"
    );
    println!(
        "{:<26} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "codec", "bytes", "r += g", "encode", "of add", "decode", "of add", "enc host", "dec host"
    );
    let mut bench = bench::Bench::new(&device, elements)?;
    for row in bench.measure(&codecs, repeats)? {
        println!(
            "{:<26} {:>10} {:>8.3} {:>8.3} {:>8.2} {:>8.3} {:>8.2} {:>8.3} {:>8.3}",
            row.codec,
            row.bytes,
            row.add_ms,
            row.encode_ms,
            row.add_ms / row.encode_ms,
            row.decode_ms,
            row.add_ms / row.decode_ms,
            row.to_host_ms,
            row.from_host_ms
        );
    }
    let power = bench.measure_power(4, repeats)?;
    println!(
        "powersgd:4: P {:.3}, Q {:.3}, result and residual {:.3}; r += g {:.3}",
        power.p_ms, power.q_ms, power.end_ms, power.add_ms
    );
    Ok(())
}
