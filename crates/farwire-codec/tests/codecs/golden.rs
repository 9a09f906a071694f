//! The wire format, byte for byte: ranks of different builds must understand each other.
//!
//! A changed hash means a changed protocol. A new codec may add its own.

use farwire_codec::*;

use crate::{Random, messages};

/// The id by which ranks compare codecs, and a hash of what each codec sends and owes, as worker
/// and as owner.
const HASHES: [(&str, u32, u64); 24] = [
    ("none", 0x0000_0001, 0x991f_53cc_48c4_5172),
    ("bf16", 0xa19c_a2ea, 0x4fc3_b15c_3168_e7b8),
    ("f16", 0x0032_11ca, 0x5dd6_dce5_c9a1_fb09),
    ("topk:0.01", 0x5ffd_7fa0, 0x3d43_9df4_76d6_8078),
    ("topk:0.05,values=f32", 0xf10f_2c90, 0x85b1_4c15_e8c5_2c85),
    ("topk:0.01,values=int8", 0x5d48_4ee2, 0x7d2b_ef69_4bcf_2da6),
    ("topk:0.02,mode=union", 0x1d22_9a86, 0xabdf_216c_774d_a1bc),
    ("topk:0.02,values=int8,mode=union", 0x0b62_41f4, 0x540f_baab_19b8_cb43),
    ("topk:count=3", 0x02f0_5400, 0xb6f8_c69c_c301_0e84),
    ("topk:1", 0x2ecd_4e84, 0x3d40_fc0c_3892_6b88),
    ("topk:2/64", 0x9681_a17c, 0x482d_a2b9_164f_5652),
    ("topk:5/100,values=int8", 0x4034_ceae, 0x6cc7_e1b9_6fb8_13ef),
    ("randk:0.01", 0x2083_75b6, 0x4e29_c5ee_c35e_bbf3),
    ("randk:0.1,values=f32,seed=9", 0x0911_6f2b, 0x4abc_3c6a_2fa1_933e),
    ("int8", 0x6491_fa92, 0xc982_8f6a_d9c3_ec2f),
    ("int8,block=16,rounding=stochastic", 0x9b25_14cf, 0x0e8a_28d9_84b9_f79f),
    ("int8,rotate=on", 0xe8e3_4c95, 0xd0b4_bb77_aac5_6766),
    ("int4", 0x6892_00de, 0x2127_a66b_e22a_99d8),
    ("int4,rotate=on,block=64", 0xf316_7fd3, 0xa276_111b_38ea_9d31),
    ("int4,rotate=on,rounding=stochastic", 0x1ad8_75db, 0xf109_2520_57d1_f410),
    ("fp8", 0xf8d3_a789, 0x393b_febc_b7bd_70b0),
    ("fp8,rounding=stochastic,rotate=on", 0x52bd_7e64, 0xa11c_2b8d_cfcd_4ff6),
    ("sign", 0x0cbc_8ba4, 0x1aef_4c5e_a807_b2f2),
    ("powersgd:2", 0x1d91_4aa8, 0x8e86_6ba7_80a5_5ace),
];

/// FNV-1a.
fn hash(seed: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(seed, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn sent(name: &str) -> u64 {
    let n = 3001;
    let mut random = Random(99);
    let (gradient, owed) = (random.normals(n), random.normals(n));
    let context = Context { seed: 4, step: 5, tensor: 6 };
    let Some(codec) = messages(name) else {
        let spec: CodecSpec = name.parse().unwrap();
        let Travel::Factors(codec) = spec.travels() else { unreachable!("{name} has no messages") };
        let residual = Residual::Owed(&owed);
        let p = codec
            .begin(gradient.as_slice().into(), residual, None, Shape::of(&[n]), context)
            .unwrap();
        let sum = p.p().to_vec();
        let q = p.with_sum(sum.clone()).unwrap();
        return hash(hash(0xcbf2_9ce4_8422_2325, &floats(&sum)), &floats(q.q()));
    };
    let place = CodedPlace::whole(context, n);
    let shards = [0..1000, 1000..1024, 1024..n];
    let mut out = Encoded::default();
    let job = Job { rank: 1, ..Job::worker(&gradient, Residual::Owed(&owed), &place, &shards) };
    codec.encode(&job, &mut out).unwrap();
    let worker =
        out.messages.iter().fold(0xcbf2_9ce4_8422_2325, |seed, message| hash(seed, message));
    let worker = hash(worker, &floats(&out.residual));
    let part = place.part(shards[2].clone());
    codec
        .encode(&Job::owner(&gradient[shards[2].clone()], Residual::Zero, &part), &mut out)
        .unwrap();
    hash(hash(worker, &out.messages[0]), &floats(&out.residual))
}

#[test]
fn messages_are_byte_for_byte_what_they_were() {
    for (name, id, expected) in HASHES {
        assert_eq!(name.parse::<CodecSpec>().unwrap().id().get(), id, "{name}");
        assert_eq!(sent(name), expected, "{name}: {:#018x}", sent(name));
    }
}
