//! Tier 3: ranks as threads, through shared memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::sync::Barrier;
use std::time::Duration;

use common::{every_collective, on_threads, subgroups};
use farwire::{Call, DType, Fault, Options, Peer, Rank, ReduceOp, Tag};
use half::bf16;

#[test]
fn every_collective_equals_the_oracle() {
    for n in [1, 2, 3, 5, 8] {
        on_threads(n, |comm| {
            for len in [0, 1, n - 1, n, n + 1, 1009] {
                every_collective::<f32>(&comm, len, ReduceOp::Sum);
                every_collective::<bf16>(&comm, len, ReduceOp::Sum);
                every_collective::<i32>(&comm, len, ReduceOp::Max);
            }
        });
    }
}

#[test]
fn long_vectors_cross_many_slots() {
    for n in [2, 3] {
        on_threads(n, |comm| {
            every_collective::<f32>(&comm, 65_537, ReduceOp::Sum);
            let result = comm.all_reduce(vec![1.0f32; 2_097_153], ReduceOp::Sum).wait().unwrap();
            assert!(result.iter().all(|x| *x == n as f32));
        });
    }
}

#[test]
fn sixty_four_operations_in_flight_at_once() {
    on_threads(4, |comm| {
        for _ in 0..3 {
            let pending: Vec<_> = (0..64u32)
                .map(|i| comm.all_reduce(vec![i; 1000 + i as usize], ReduceOp::Sum))
                .collect();
            for (i, pending) in pending.into_iter().enumerate().rev() {
                assert_eq!(pending.wait().unwrap(), vec![4 * i as u32; 1000 + i]);
            }
        }
    });
}

/// A call as a value names a type, which its vector must have.
#[test]
fn a_vector_of_another_type_than_its_call_is_refused_and_comes_back() {
    on_threads(2, |comm| {
        let count = 4;
        let sum = |dtype| Call::AllReduce { count, dtype, op: ReduceOp::Sum };
        let parcel = Call::SendParcel { to: Rank(1 - comm.rank() as u32), tag: Tag(0), len: 16 };
        for call in [sum(DType::I32), sum(DType::F64), parcel] {
            let mut error = comm.run(call, vec![1.0f32; count]).wait().unwrap_err();
            assert!(error.to_string().contains("takes no vector of f32"), "{error}");
            assert_eq!(error.take_input::<f32>(), Some(vec![1.0; count]));
        }
        // The refused calls do not count as made.
        assert_eq!(comm.run(sum(DType::F32), vec![1.0f32; count]).wait().unwrap(), [2.0; 4]);
        assert!(comm.run(Call::Barrier, Vec::<f32>::new()).wait().unwrap().is_empty());
    });
}

/// Segments that fit no slot are cut down, alike on all ranks.
#[test]
fn segments_of_any_size_work() {
    for segment in [1, 1000, 1 << 20, usize::MAX] {
        on_threads(3, |comm| {
            let options =
                Options { segment: std::num::NonZeroUsize::new(segment), ..Options::default() };
            let len = if segment == 1 { 100 } else { 300_000 };
            let sum = comm
                .with_options(options)
                .all_reduce(vec![1.0f64; len], ReduceOp::Sum)
                .wait()
                .unwrap();
            assert_eq!(sum, vec![3.0; len]);
        });
    }
}

#[test]
fn a_loop_of_small_operations_stays_right() {
    on_threads(3, |comm| {
        for i in 0..5000u64 {
            let sum =
                comm.all_reduce(vec![i + comm.rank() as u64; 3], ReduceOp::Sum).wait().unwrap();
            assert_eq!(sum, [3 * i + 3; 3]);
        }
    });
}

#[test]
fn a_dropped_result_holds_nobody_up() {
    on_threads(3, |comm| {
        drop(comm.all_reduce(vec![1u8; 300_000], ReduceOp::Sum));
        drop(comm.barrier());
        assert_eq!(comm.all_reduce(vec![1u8; 3], ReduceOp::Sum).wait().unwrap(), [3; 3]);
    });
}

#[test]
fn several_threads_wait_on_one_rank() {
    on_threads(2, |comm| {
        let groups: Vec<_> = (0..4).map(|_| comm.split(0, 0).unwrap()).collect();
        std::thread::scope(|scope| {
            for (group, i) in groups.iter().zip(0u32..) {
                scope.spawn(move || {
                    for round in 0..200 {
                        let sum =
                            group.all_reduce(vec![i + round; 100], ReduceOp::Sum).wait().unwrap();
                        assert_eq!(sum, vec![2 * (i + round); 100]);
                    }
                });
            }
        });
    });
}

#[test]
fn futures_complete_without_anyone_waiting() {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Wake};

    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    on_threads(3, |comm| {
        for len in [1, 100_000, 1_000_000] {
            let mut future = pin!(comm.all_reduce(vec![1i64; len], ReduceOp::Sum));
            let waker = Arc::new(Unpark(std::thread::current())).into();
            let result = loop {
                match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                    Poll::Ready(result) => break result.unwrap(),
                    Poll::Pending => std::thread::park(),
                }
            };
            assert_eq!(result, vec![3; len]);
        }
    });
}

#[test]
fn a_wait_with_a_limit_leaves_the_operation_running() {
    let limit_is_over = Barrier::new(2);
    on_threads(2, |comm| {
        if comm.rank() == 1 {
            limit_is_over.wait();
        }
        let sum = comm.all_reduce(vec![1u32], ReduceOp::Sum);
        if comm.rank() == 0 {
            assert!(!sum.wait_for(Duration::from_millis(1)), "rank 1 has not called");
            limit_is_over.wait();
        }
        while !sum.wait_for(Duration::from_millis(50)) {}
        assert!(sum.wait_for(Duration::ZERO) && sum.is_done());
        assert_eq!(sum.wait().unwrap(), [2]);
    });
}

#[test]
fn a_group_splits_by_color_and_orders_by_key() {
    on_threads(5, |comm| {
        let me = comm.rank() as u32;
        let group = comm.split(me % 2, 100 - me).unwrap();
        let members = group.all_gather(vec![me]).wait().unwrap();
        assert_eq!(members, if me.is_multiple_of(2) { vec![4, 2, 0] } else { vec![3, 1] });
        let nested = group.split(0, me).unwrap();
        assert_eq!(nested.size(), group.size());
        assert!(nested.all_gather(vec![me]).wait().unwrap().is_sorted());
    });
}

#[test]
fn some_ranks_form_a_group_while_the_others_do_something_else() {
    on_threads(5, |comm| subgroups(&comm));
}

#[test]
fn members_alone_make_their_groups_and_the_wrong_ones_are_refused() {
    on_threads(5, |comm| {
        let me = comm.rank();
        let says = |ranks: &[usize]| comm.subgroup(ranks, "wrong").unwrap_err().to_string();
        assert!(says(&[]).contains("not among the members"), "{}", says(&[]));
        assert!(says(&[(me + 1) % 5]).contains(&format!("this is rank {me}")));
        assert!(says(&[me, 5]).contains("use 0 to 4"));
        assert!(says(&[me, (me + 1) % 5, me]).contains(&format!("rank {me} is listed twice")));

        // A group of one; and a group made from a group, by that group's ranks.
        let alone = comm.subgroup(&[me], "alone").unwrap();
        assert_eq!(alone.all_reduce(vec![7u8], ReduceOp::Sum).wait().unwrap(), [7]);
        if me == 0 {
            return;
        }
        let some = comm.subgroup(&[4, 3, 2, 1], "some").unwrap();
        assert_eq!(some.rank(), 4 - me);
        if some.rank() < 2 {
            let pair = some.subgroup(&[1, 0], "pair").unwrap();
            assert_eq!(pair.all_gather(vec![me as u32]).wait().unwrap(), [3, 4]);
        }
    });
}

#[test]
fn groups_of_the_same_name_and_ranks_are_new_ones_each_time() {
    on_threads(3, |comm| {
        if comm.rank() == 1 {
            return;
        }
        let make = || comm.subgroup(&[0, 2], "again").unwrap();
        let (first, second) = (make(), make());
        // Each has its own order of calls.
        let mine = |add: u32| vec![comm.rank() as u32 + add];
        let (a, b) = if comm.rank() == 0 {
            let a = first.all_gather(mine(10));
            (a, second.all_gather(mine(20)))
        } else {
            let b = second.all_gather(mine(20));
            (first.all_gather(mine(10)), b)
        };
        assert_eq!(a.wait().unwrap(), [10, 12]);
        assert_eq!(b.wait().unwrap(), [20, 22]);
        drop((first, second));
        let third = make();
        assert_eq!(third.all_gather(mine(30)).wait().unwrap(), [30, 32]);
        // Their ids are not those of groups made by split, nor of groups with another name.
        let other = comm.subgroup(&[0, 2], "another").unwrap();
        assert_eq!(other.split(0, 0).unwrap().size(), 2);
    });
}

#[test]
fn members_that_list_a_group_in_another_order_are_told_so() {
    on_threads(2, |comm| {
        let ranks = if comm.rank() == 0 { [0, 1] } else { [1, 0] };
        let group = comm.subgroup(&ranks, "order").unwrap();
        let error = group.barrier().wait().unwrap_err();
        assert!(matches!(error.fault(), Some(Fault::Desync(..))), "{error}");
    });
}

#[test]
fn a_fault_in_a_group_names_ranks_of_the_group_and_of_the_world() {
    on_threads(4, |comm| {
        if [0, 2].contains(&comm.rank()) {
            return;
        }
        let group = comm.subgroup(&[3, 2, 1], "some").unwrap();
        for _ in 0..2 {
            // The first fails on its way, the second before it has begun.
            let error =
                group.all_reduce(vec![1.0f32; 10], ReduceOp::Sum).wait().unwrap_err().to_string();
            assert!(error.contains("rank 1 of the group (rank 2 of the world) is lost"), "{error}");
        }
    });
}

#[test]
fn messages_keep_order_and_tag() {
    on_threads(2, |comm| {
        if comm.rank() == 0 {
            for i in 0..100u32 {
                comm.send(vec![i], 1, i % 2).wait().unwrap();
            }
        } else {
            for tag in [1, 0] {
                for i in (tag..100).step_by(2) {
                    assert_eq!(comm.recv::<u32>(1, 0, tag).wait().unwrap(), [i]);
                }
            }
        }
    });
}

#[test]
fn in_sync_tells_equal_from_different() {
    on_threads(3, |comm| {
        assert!(comm.is_in_sync(&[1.0f32, 2.0]).unwrap());
        assert!(!comm.is_in_sync(&[comm.rank() as f32, 2.0]).unwrap());
        assert!(!comm.is_in_sync(&vec![0u8; comm.rank()]).unwrap());
        let zero = if comm.rank() == 0 { 0.0f32 } else { -0.0 };
        assert!(!comm.is_in_sync(&[zero]).unwrap(), "the same bits, not the same numbers");
    });
}

#[test]
fn a_rank_that_leaves_early_is_an_error_for_the_others_and_the_input_comes_back() {
    on_threads(3, |comm| {
        comm.barrier().wait().unwrap();
        if comm.rank() == 1 {
            return;
        }
        let mine = vec![comm.rank() as f32; 100_000];
        let mut error = comm.all_reduce(mine.clone(), ReduceOp::Sum).wait().unwrap_err();
        assert_eq!(error.fault(), Some(&Fault::PeerLost(Peer(1))));
        assert!(error.to_string().contains("rank 1 is lost"), "{error}");
        assert_eq!(error.take_input::<f32>(), Some(mine));
        assert!(comm.barrier().wait().is_err());
    });
}

#[test]
fn what_was_sent_before_leaving_still_arrives() {
    let left = Barrier::new(2);
    on_threads(2, |comm| {
        if comm.rank() == 0 {
            comm.send(vec![7u8; 100_000], 1, 0).wait().unwrap();
            drop(comm);
            left.wait();
        } else {
            left.wait();
            assert_eq!(comm.recv::<u8>(100_000, 0, 0).wait().unwrap(), vec![7; 100_000]);
        }
    });
}

#[test]
fn mismatched_calls_are_an_error_on_all_ranks() {
    on_threads(4, |comm| {
        let len = if comm.rank() == 2 { 11 } else { 10 };
        let error = comm.all_reduce(vec![1.0f32; len], ReduceOp::Sum).wait().unwrap_err();
        assert!(matches!(error.fault(), Some(Fault::Desync(..))), "{error}");
        assert!(
            error.to_string().contains("f32 × 10") && error.to_string().contains("f32 × 11"),
            "{error}"
        );
    });
}

#[test]
fn a_deadline_ends_the_wait() {
    let too_late = Barrier::new(2);
    on_threads(2, |comm| {
        if comm.rank() == 0 {
            let hasty = comm.with_options(Options {
                deadline: Some(Duration::from_millis(50)),
                ..Options::default()
            });
            let error = hasty.all_reduce(vec![1u8], ReduceOp::Sum).wait().unwrap_err();
            assert!(
                matches!(error.fault(), Some(Fault::TimedOut { waiting_for: Peer(1), .. })),
                "{error}"
            );
        }
        too_late.wait();
        // The other rank learns at its next call, which is out of step or comes after the news.
        assert!(comm.barrier().wait().is_err());
    });
}

/// A waker may do anything, even drop the last handle.
#[test]
fn a_waker_may_drop_the_last_handle() {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::mpsc::{Sender, channel};
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Wake};

    struct LetGo(Mutex<Option<(farwire::Communicator, Sender<()>)>>);
    impl Wake for LetGo {
        fn wake(self: Arc<Self>) {
            let held = self.0.lock().unwrap().take();
            if let Some((comm, done)) = held {
                drop(comm);
                done.send(()).unwrap();
            }
        }
    }
    let mut ranks = farwire::local(2).unwrap();
    let (b, a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    let (done, is_done) = channel();
    let mut pending = pin!(a.barrier());
    let waker = Arc::new(LetGo(Mutex::new(Some((a, done))))).into();
    assert!(matches!(pending.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Pending));
    b.barrier().wait().unwrap();
    is_done.recv().unwrap();
}
