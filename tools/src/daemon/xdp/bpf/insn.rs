//! A small assembler of eBPF (RFC 9669): as much of it as a program that looks at packets needs.

/// Class and addressing bits of the opcodes in use.
mod code {
    pub const LDX_MEM: u8 = 0x61;
    pub const STX_MEM: u8 = 0x63;
    pub const ST_MEM: u8 = 0x62;
    pub const LD_IMM64: u8 = 0x18;
    pub const ALU64_IMM: u8 = 0x07;
    pub const ALU64_REG: u8 = 0x0f;
    pub const TO_BE: u8 = 0xdc;
    pub const JMP_IMM: u8 = 0x05;
    pub const JMP_REG: u8 = 0x0d;
    pub const CALL: u8 = 0x85;
    pub const EXIT: u8 = 0x95;
}
/// In the source register of [`code::LD_IMM64`]: the constant is the descriptor of a map, or stands for the address of the
/// only value of one.
const PSEUDO_MAP_FD: u8 = 1;
const PSEUDO_MAP_VALUE: u8 = 2;

/// An instruction as the kernel takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Insn {
    code: u8,
    /// Destination and source, four bits each.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// A register, by its number: calls take their arguments in R1 to R5, which they spoil, and give their result in R0; R10 is the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    R6 = 6,
    R7,
    R8,
    R9,
    R10,
}

/// How many bytes a load or store moves.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub enum Size {
    B4 = 0x00,
    B2 = 0x08,
    B1 = 0x10,
    B8 = 0x18,
}

/// Arithmetic on 64 bits, named as the instructions are.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub enum Op {
    Add = 0x00,
    Sub = 0x10,
    Or = 0x40,
    And = 0x50,
    Shl = 0x60,
    Shr = 0x70,
    Mov = 0xb0,
}

/// When to jump, named as the instructions are; comparisons are unsigned.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub enum If {
    Eq = 0x10,
    Gt = 0x20,
    Ge = 0x30,
    /// A bit is set in both.
    Set = 0x40,
    Ne = 0x50,
    Lt = 0xa0,
}

/// What an operation takes beside its destination.
#[derive(Clone, Copy, Debug)]
pub enum From {
    /// The value of a register.
    Reg(Reg),
    /// A constant, extended to 64 bits with its sign.
    Imm(i32),
}

impl std::convert::From<Reg> for From {
    fn from(register: Reg) -> Self {
        Self::Reg(register)
    }
}

impl std::convert::From<i32> for From {
    fn from(constant: i32) -> Self {
        Self::Imm(constant)
    }
}

/// A place to jump to.
#[derive(Clone, Copy, Debug)]
pub struct Label(usize);

/// Why a program can't be made: a mistake of who wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssembleError {
    /// A jump goes to a label that is nowhere.
    #[error("a jump to nowhere")]
    Unbound,
    /// A jump goes back, or further than an instruction can say.
    #[error("a jump that goes back, or too far")]
    Distance,
}

/// A program being written.
#[derive(Debug, Default)]
pub struct Assembler {
    program: Vec<Insn>,
    labels: Vec<Option<usize>>,
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    /// A label that is to be put somewhere by [`Assembler::here`].
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Puts the label before the next instruction.
    pub fn here(&mut self, label: Label) {
        self.labels[label.0] = Some(self.program.len());
    }

    /// `dst = dst op from`; of [`Op::Mov`] `dst = from`.
    pub fn op(&mut self, op: Op, dst: Reg, from: impl Into<From>) {
        match from.into() {
            From::Reg(src) => self.push(code::ALU64_REG | op as u8, dst, src, 0, 0),
            From::Imm(constant) => self.push(code::ALU64_IMM | op as u8, dst, Reg::R0, 0, constant),
        }
    }

    /// `dst = from`.
    pub fn mov(&mut self, dst: Reg, from: impl Into<From>) {
        self.op(Op::Mov, dst, from);
    }

    /// Loads 16 bits in network byte order from `[src + offset]`.
    pub fn load_be16(&mut self, dst: Reg, src: Reg, offset: i16) {
        self.load(Size::B2, dst, src, offset);
        self.push(code::TO_BE, dst, Reg::R0, 0, 16);
    }

    /// `dst = [src + offset]`, with zeros above.
    pub fn load(&mut self, size: Size, dst: Reg, src: Reg, offset: i16) {
        self.push(code::LDX_MEM | size as u8, dst, src, offset, 0);
    }

    /// `[dst + offset] = from`.
    pub fn store(&mut self, size: Size, dst: Reg, offset: i16, from: impl Into<From>) {
        match from.into() {
            From::Reg(src) => self.push(code::STX_MEM | size as u8, dst, src, offset, 0),
            From::Imm(constant) => self.push(code::ST_MEM | size as u8, dst, Reg::R0, offset, constant),
        }
    }

    /// `dst` becomes the map of a descriptor.
    pub fn load_map(&mut self, dst: Reg, fd: i32) {
        self.load_of_map(PSEUDO_MAP_FD, dst, fd);
    }

    /// `dst` becomes the address of the only value of a map (since Linux 5.2).
    pub fn load_value(&mut self, dst: Reg, fd: i32) {
        self.load_of_map(PSEUDO_MAP_VALUE, dst, fd);
    }

    fn load_of_map(&mut self, what: u8, dst: Reg, fd: i32) {
        let registers = pack(dst as u8, what);
        self.program.push(Insn {
            code: code::LD_IMM64,
            registers,
            offset: 0,
            immediate: fd,
        });
        // The upper half of the constant: where in the value.
        self.push(0, Reg::R0, Reg::R0, 0, 0);
    }

    /// Calls a helper of the kernel.
    pub fn call(&mut self, helper: i32) {
        self.push(code::CALL, Reg::R0, Reg::R0, 0, helper);
    }

    /// Jumps forward.
    pub fn jump(&mut self, to: Label) {
        self.jumps.push((self.program.len(), to));
        self.push(code::JMP_IMM, Reg::R0, Reg::R0, 0, 0);
    }

    /// Jumps forward if it is so of `left` and `right`.
    pub fn jump_if(&mut self, when: If, left: Reg, right: impl Into<From>, to: Label) {
        self.jumps.push((self.program.len(), to));
        match right.into() {
            From::Reg(right) => self.push(code::JMP_REG | when as u8, left, right, 0, 0),
            From::Imm(constant) => self.push(code::JMP_IMM | when as u8, left, Reg::R0, 0, constant),
        }
    }

    /// Ends the program with the value of R0.
    pub fn exit(&mut self) {
        self.push(code::EXIT, Reg::R0, Reg::R0, 0, 0);
    }

    /// The whole program.
    pub fn finish(mut self) -> Result<Vec<Insn>, AssembleError> {
        for (at, label) in self.jumps {
            let to = self.labels[label.0].ok_or(AssembleError::Unbound)?;
            let distance = to.checked_sub(at + 1).ok_or(AssembleError::Distance)?;
            self.program[at].offset = distance.try_into().map_err(|_| AssembleError::Distance)?;
        }
        Ok(self.program)
    }

    fn push(&mut self, code: u8, dst: Reg, src: Reg, offset: i16, immediate: i32) {
        self.program.push(Insn {
            code,
            registers: pack(dst as u8, src as u8),
            offset,
            immediate,
        });
    }
}

/// C's bit fields: the first lies low on little-endian machines, and high on the others.
fn pack(dst: u8, src: u8) -> u8 {
    if cfg!(target_endian = "little") {
        dst | src << 4
    } else {
        dst << 4 | src
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel's own macros of `linux/filter.h` make of the same.
    #[test]
    #[cfg(target_endian = "little")]
    fn instructions_are_the_kernels() {
        let mut asm = Assembler::default();
        asm.mov(Reg::R6, Reg::R1);
        asm.mov(Reg::R0, 2);
        asm.op(Op::Add, Reg::R2, -20);
        asm.op(Op::Sub, Reg::R9, Reg::R7);
        asm.op(Op::Shl, Reg::R2, 8);
        asm.op(Op::Or, Reg::R3, 0xfff);
        asm.load(Size::B1, Reg::R2, Reg::R7, 23);
        asm.load(Size::B8, Reg::R2, Reg::R7, 38);
        asm.load_be16(Reg::R2, Reg::R7, 12);
        asm.store(Size::B4, Reg::R10, -20, Reg::R4);
        asm.store(Size::B8, Reg::R10, -16, 0);
        asm.load_map(Reg::R1, 7);
        asm.call(1);
        asm.exit();
        let bytes: Vec<[u8; 8]> = asm.finish().unwrap().iter().map(|it| bytes(*it)).collect();
        let expected: [[u8; 8]; 16] = [
            [0xbf, 0x16, 0, 0, 0, 0, 0, 0],
            [0xb7, 0x00, 0, 0, 2, 0, 0, 0],
            [0x07, 0x02, 0, 0, 0xec, 0xff, 0xff, 0xff],
            [0x1f, 0x79, 0, 0, 0, 0, 0, 0],
            [0x67, 0x02, 0, 0, 8, 0, 0, 0],
            [0x47, 0x03, 0, 0, 0xff, 0x0f, 0, 0],
            [0x71, 0x72, 23, 0, 0, 0, 0, 0],
            [0x79, 0x72, 38, 0, 0, 0, 0, 0],
            [0x69, 0x72, 12, 0, 0, 0, 0, 0],
            [0xdc, 0x02, 0, 0, 16, 0, 0, 0],
            [0x63, 0x4a, 0xec, 0xff, 0, 0, 0, 0],
            [0x7a, 0x0a, 0xf0, 0xff, 0, 0, 0, 0],
            [0x18, 0x11, 0, 0, 7, 0, 0, 0],
            [0; 8],
            [0x85, 0x00, 0, 0, 1, 0, 0, 0],
            [0x95, 0x00, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(bytes, expected);
    }

    fn bytes(insn: Insn) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[0] = insn.code;
        bytes[1] = insn.registers;
        bytes[2..4].copy_from_slice(&insn.offset.to_ne_bytes());
        bytes[4..].copy_from_slice(&insn.immediate.to_ne_bytes());
        bytes
    }

    #[test]
    fn jumps_go_forward_to_their_labels() {
        let mut asm = Assembler::default();
        let (near, far) = (asm.label(), asm.label());
        asm.jump_if(If::Ne, Reg::R2, 0x45, far);
        asm.jump(near);
        asm.mov(Reg::R0, 1);
        asm.here(near);
        asm.jump_if(If::Gt, Reg::R2, Reg::R8, far);
        asm.load_map(Reg::R1, 3);
        asm.here(far);
        asm.exit();
        let program = asm.finish().unwrap();
        assert_eq!((program[0].code, program[0].offset), (0x55, 5));
        assert_eq!((program[1].code, program[1].offset), (0x05, 1));
        // Both halves of a 64-bit constant count.
        assert_eq!((program[3].code, program[3].offset), (0x2d, 2));
    }

    #[test]
    fn mistakes_are_found() {
        let mut asm = Assembler::default();
        let nowhere = asm.label();
        asm.jump(nowhere);
        assert_eq!(asm.finish(), Err(AssembleError::Unbound));

        let mut asm = Assembler::default();
        let back = asm.label();
        asm.here(back);
        asm.jump(back);
        assert_eq!(asm.finish(), Err(AssembleError::Distance));

        let mut asm = Assembler::default();
        let far = asm.label();
        asm.jump(far);
        for _ in 0..=i16::MAX {
            asm.exit();
        }
        asm.here(far);
        asm.exit();
        assert_eq!(asm.finish(), Err(AssembleError::Distance));
    }
}
