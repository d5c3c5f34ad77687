//! eBPF without a compiler: an assembler ([`insn`]), the calls of bpf(2) ([`sys`]), and the program that steers ([`program`]).

pub mod insn;
pub mod program;
pub mod sys;
