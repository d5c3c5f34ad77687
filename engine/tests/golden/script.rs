//! What `gen` (tests/golden/gen.c) was told to do in a capture, and what that makes each side do.

use ferroce_engine::verbs::{Operation, QpType, SendFlags, WcFlags, WcOpcode};
use ferroce_wire::PathMtu;

/// What the server put where atomics go, and what they compare, swap in and add.
pub const ATOMIC_VALUE: u64 = 0x1122_3344_5566_7788;
const SWAP: u64 = 0x99aa_bbcc_ddee_ff00;
const ADD: u64 = 0x10;

/// The client's buffer, and what it knows of the server's.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    pub addr: u64,
    pub rkey: u32,
    /// Of the memory window that a SEND invalidates.
    pub window: u32,
}

/// `gen`'s options.
#[derive(Clone, Debug)]
pub struct Options {
    pub qp_type: QpType,
    pub path_mtu: PathMtu,
    /// The Q_Key of all UD QPs.
    pub qkey: u32,
    /// The client's first PSN.
    pub client_psn: u32,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub max_rd_atomic: u8,
}

impl Options {
    /// The server's first PSN.
    pub fn server_psn(&self) -> u32 {
        (self.client_psn + 0x100) & 0xff_ffff
    }
}

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Send,
    SendImm,
    SendInv,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
}

/// One operation.
#[derive(Clone, Debug)]
pub struct Op {
    /// Its place in the list.
    pub index: usize,
    pub work: Work,
    /// Bytes of each message.
    pub len: usize,
    /// Messages, in one post.
    pub count: usize,
    pub solicited: bool,
    /// It names a key that the server has not.
    pub bad_key: bool,
    /// Bytes of the receives that the server posts, if it does.
    pub receive: Option<usize>,
    /// The receive is posted late.
    pub late: bool,
    /// What an atomic finds.
    pub original: u64,
}

impl Op {
    fn parse(index: usize, word: &str, ud: bool) -> Op {
        let (name, number) = word.split_once(':').unwrap_or((word, "64"));
        let mut op = Op {
            index,
            work: Work::Send,
            len: number.parse().unwrap(),
            count: 1,
            solicited: name == "sendse",
            bad_key: name.starts_with("bad"),
            receive: None,
            late: name == "rnr",
            original: ATOMIC_VALUE,
        };
        op.work = match name {
            "send" | "sendse" | "rnr" | "short" => Work::Send,
            "sendimm" => Work::SendImm,
            "sendinv" => Work::SendInv,
            "burst" => {
                (op.count, op.len) = (op.len, 16);
                Work::Send
            }
            "write" | "badkey" => Work::Write,
            "writes" => {
                op.count = 3;
                Work::Write
            }
            "writeimm" => Work::WriteImm,
            "read" | "badread" => Work::Read,
            "reads" => {
                op.count = 3;
                Work::Read
            }
            "cas" | "casmiss" | "badatomic" => Work::CompareSwap,
            "faa" => Work::FetchAdd,
            _ => panic!("gen has no operation {name}"),
        };
        if op.is_atomic() {
            op.len = 8;
        }
        if name == "casmiss" {
            op.original = 1;
        }
        let grh = if ud { 40 } else { 0 };
        op.receive = match op.work {
            Work::Send if name == "short" => Some(op.len / 2),
            Work::Send | Work::SendImm | Work::SendInv => Some(op.len + grh),
            Work::WriteImm => Some(0),
            _ => None,
        };
        op
    }

    pub fn is_atomic(&self) -> bool {
        matches!(self.work, Work::CompareSwap | Work::FetchAdd)
    }

    /// Whether the receive is long enough.
    pub fn fits(&self) -> bool {
        self.work == Work::WriteImm || self.receive.is_none_or(|receive| self.len <= receive)
    }

    /// PSNs that it takes.
    pub fn packets(&self, mtu: usize) -> usize {
        let message = if self.is_atomic() {
            1
        } else {
            self.len.div_ceil(mtu).max(1)
        };
        self.count * message
    }

    /// Its bytes from `offset` on.
    pub fn pattern(&self, offset: usize, len: usize) -> Vec<u8> {
        (offset..offset + len)
            .map(|k| (k + 7 * self.index) as u8)
            .collect()
    }

    /// Its immediate data, in network order as verbs have it.
    pub fn imm(&self) -> u32 {
        (0xcafe_0000 + self.index as u32).to_be()
    }

    /// What the client posts.
    pub fn operation(&self, remote: &Remote) -> Operation {
        let addr = remote.addr;
        let rkey = if self.bad_key {
            remote.rkey ^ 0x5500
        } else {
            remote.rkey
        };
        match self.work {
            Work::Send => Operation::Send,
            Work::SendImm => Operation::SendImm(self.imm()),
            Work::SendInv => Operation::SendInv(remote.window),
            Work::Write => Operation::Write { addr, rkey },
            Work::WriteImm => Operation::WriteImm {
                addr,
                rkey,
                imm: self.imm(),
            },
            Work::Read => Operation::Read { addr, rkey },
            Work::CompareSwap => Operation::CompareSwap {
                addr,
                rkey,
                compare: ATOMIC_VALUE,
                swap: SWAP,
            },
            Work::FetchAdd => Operation::FetchAdd { addr, rkey, add: ADD },
        }
    }

    /// The flags of the message `k` of the post.
    pub fn flags(&self, k: usize) -> SendFlags {
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, k + 1 == self.count);
        flags.set(SendFlags::SOLICITED, self.solicited);
        flags
    }

    /// Opcode of the client's completion.
    pub fn sent(&self) -> WcOpcode {
        match self.work {
            Work::Send | Work::SendImm | Work::SendInv => WcOpcode::Send,
            Work::Write | Work::WriteImm => WcOpcode::RdmaWrite,
            Work::Read => WcOpcode::RdmaRead,
            Work::CompareSwap => WcOpcode::CompSwap,
            Work::FetchAdd => WcOpcode::FetchAdd,
        }
    }

    /// Opcode and flags of the server's completions, the GRH's aside.
    pub fn received(&self) -> (WcOpcode, WcFlags) {
        match self.work {
            Work::SendImm => (WcOpcode::Recv, WcFlags::WITH_IMM),
            Work::SendInv => (WcOpcode::Recv, WcFlags::WITH_INV),
            Work::WriteImm => (WcOpcode::RecvRdmaWithImm, WcFlags::WITH_IMM),
            _ => (WcOpcode::Recv, WcFlags::empty()),
        }
    }

    /// What atomics leave behind.
    pub fn result(&self) -> u64 {
        match self.work {
            Work::FetchAdd => self.original + ADD,
            _ if self.original == ATOMIC_VALUE => SWAP,
            _ => self.original,
        }
    }
}

/// Reads a command line of `gen`.
pub fn parse(line: &str) -> (Options, Vec<Op>) {
    let mut options = Options {
        qp_type: QpType::Rc,
        path_mtu: PathMtu::Mtu1024,
        qkey: 0x1111_1111,
        client_psn: 0x100,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 4,
    };
    let mut ops = Vec::new();
    let mut words = line.split_whitespace();
    while let Some(word) = words.next() {
        if !word.starts_with('-') {
            ops.push(Op::parse(ops.len(), word, options.qp_type == QpType::Ud));
            continue;
        }
        let value = words.next().unwrap();
        match word {
            "-t" if value == "uc" => options.qp_type = QpType::Uc,
            "-t" if value == "ud" => options.qp_type = QpType::Ud,
            "-m" => options.path_mtu = PathMtu::from_bytes(value.parse().unwrap()).unwrap(),
            "-P" => options.client_psn = u32::from_str_radix(value.trim_start_matches("0x"), 16).unwrap(),
            "-T" => options.timeout = value.parse().unwrap(),
            "-R" => options.retry_cnt = value.parse().unwrap(),
            "-r" => options.rnr_retry = value.parse().unwrap(),
            "-A" => options.max_rd_atomic = value.parse().unwrap(),
            // What these say is in the packets' addresses.
            "-g" | "-G" => {}
            _ => panic!("gen has no option {word} {value}"),
        }
    }
    (options, ops)
}
