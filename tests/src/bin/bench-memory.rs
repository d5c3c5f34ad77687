//! What fault-safe copies cost, next to plain ones: nanoseconds by size, warm caches, the median of several runs.

use std::hint::black_box;
use std::time::Instant;

use ferroce_engine::memory::Memory;
use ferroce_engine::memory::process::ProcessMemory;

const SIZES: [usize; 12] = [8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 65536];
const RUNS: usize = 15;
const COPIES: u32 = 20_000;

/// Median nanoseconds of one call of `copy`.
fn time(mut copy: impl FnMut()) -> f64 {
    let mut runs: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            (0..COPIES).for_each(|_| copy());
            start.elapsed().as_nanos() as f64 / f64::from(COPIES)
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    runs[RUNS / 2]
}

fn main() -> std::io::Result<()> {
    let memory: &dyn Memory = &ProcessMemory::new()?;
    println!(
        "{:>8} {:>10} {:>10} {:>10}",
        "bytes", "plain ns", "write ns", "read ns"
    );
    for size in SIZES {
        // A distance at which plain copies are not slow for another reason (see memory/process/guarded.rs).
        let space = vec![1u8; 2 * size + 8192];
        let source = &space[..size];
        let mut space = vec![0u8; 2 * size + 8192];
        let shift = (source.as_ptr() as usize).wrapping_sub(space.as_ptr() as usize) % 4096;
        let target = &mut space[shift..][..size];
        let addr = target.as_mut_ptr() as u64;
        let plain = time(|| black_box(&mut target[..black_box(size)]).copy_from_slice(black_box(source)));
        let write = time(|| assert!(memory.write(black_box(addr), black_box(source)).is_ok()));
        let addr = source.as_ptr() as u64;
        let read = time(|| assert!(memory.read(black_box(addr), black_box(&mut *target)).is_ok()));
        println!("{size:>8} {plain:>10.1} {write:>10.1} {read:>10.1}");
    }
    Ok(())
}
