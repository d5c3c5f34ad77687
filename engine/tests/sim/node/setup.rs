//! What a node is made of, how its QPs are connected, and how all of it ends.

use super::*;

impl Node {
    /// A node with its buffers, queues and QPs, not connected yet.
    pub fn new(program: &Program, side: usize, network: &SimNetwork, rng: &mut Prng) -> Result<Node, String> {
        let shape = &program.nodes[side];
        let mut layout = Layout::new(rng.fork());
        let mut buffers = Vec::new();
        for connection in &program.connections {
            let (out, into) = (&connection.streams[side], &connection.streams[1 - side]);
            buffers.push(Buffers {
                sends: out
                    .messages
                    .iter()
                    .map(|m| layout.buffer(if m.kind.has_buffer() { m.len } else { 0 }, m.sges))
                    .collect(),
                receives: into
                    .receives
                    .iter()
                    .map(|r| layout.buffer(r.len, r.sges))
                    .collect(),
                slots: into.slots.iter().map(|s| layout.slot(s.len)).collect(),
                windows: Vec::new(),
            });
        }
        let arena = layout.build();
        let slot = side as u8 + 1;
        let (batch, queue) = shape.tx_room;
        let (rx_capacity, window) = shape.rx_room;
        let link = network.attach(NodeConfig {
            batch,
            queue,
            rx_capacity,
            window,
            considerate: shape.considerate,
            ..NodeConfig::new(address(program, side), slot)
        });
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&rng.next_u64().to_le_bytes());
        let mut device = Device::new(DeviceConfig {
            slot,
            memory: arena.memory.clone(),
            seed,
            mtu: PathMtu::Mtu4096,
            limits: Limits::default(),
            window: Box::new(move |_| window),
        });
        let pd = ok("alloc_pd", device.alloc_pd())?;
        let (base, len) = (arena.base(), arena.len as u64);
        let (addr, len, kind) = match shape.region {
            Region::Plain => (base, len, Access::empty()),
            Region::ZeroBased => (base, len, Access::ZERO_BASED),
            Region::Everything => (0, u64::MAX, Access::ON_DEMAND),
        };
        let access = Access::LOCAL_WRITE | REMOTE | Access::FLUSH_GLOBAL | kind;
        let mr = ok("reg_mr", device.reg_mr(pd, addr, len, addr, access))?;
        let bindable = Access::LOCAL_WRITE | Access::MW_BIND | kind & Access::ZERO_BASED;
        let closed = ok(
            "reg_mr",
            device.reg_mr(pd, base, arena.len as u64, base, bindable),
        )?;
        for (connection, buffers) in buffers.iter_mut().enumerate() {
            for window in &program.connections[connection].streams[1 - side].windows {
                let mw_type = if window.two { MwType::Type2 } else { MwType::Type1 };
                buffers
                    .windows
                    .push(ok("alloc_mw", device.alloc_mw(pd, mw_type))?);
            }
            let messages = &program.connections[connection].streams[side].messages;
            for (index, (buffer, message)) in buffers.sends.iter().zip(messages).enumerate() {
                if message.kind.fetches() {
                    arena.prepare(buffer);
                } else if message.kind.has_buffer() {
                    arena.fill(
                        buffer,
                        &content(program.seed, connection, side, index, message.len),
                    );
                }
            }
            buffers.receives.iter().for_each(|buffer| arena.prepare(buffer));
            for (slot, buffer) in buffers.slots.iter().enumerate() {
                arena.fill(buffer, &initial_slot(program, connection, 1 - side, slot));
            }
            let sges = buffers
                .sends
                .iter_mut()
                .chain(&mut buffers.receives)
                .flat_map(|b| &mut b.sges);
            sges.for_each(|sge| sge.lkey = mr.lkey);
        }
        let flag = Arc::new(AtomicBool::new(true));
        let receives: usize = buffers.iter().map(|b| b.receives.len()).sum();
        let sends: usize = buffers.iter().map(|b| b.sends.len()).sum();
        let room = (sends + receives + 2 * buffers.len()) as u32;
        let mut cqs = Vec::new();
        let count = if shape.one_cq {
            1
        } else {
            1 + shape.xrc_srqs.max(1)
        };
        for _ in 0..count {
            let notify: Box<dyn CqNotify> = Box::new(Flag(flag.clone()));
            let cq = ok("create_cq", device.create_cq(room, 0, Some(notify)))?;
            cq.arm(false);
            cqs.push(cq);
        }
        let srq = if shape.srq {
            Some(ok(
                "create_srq",
                device.create_srq(pd, receives.max(1) as u32, 3, 0),
            )?)
        } else {
            None
        };
        let xrc = if shape.xrc_srqs > 0 {
            Some(xrc(&mut device, pd, shape.xrc_srqs, receives as u32, &cqs)?)
        } else {
            None
        };
        let mut node = Node {
            side,
            device,
            link,
            arena,
            pd,
            lkey: mr.lkey,
            rkey: mr.rkey,
            origin: if shape.region == Region::ZeroBased {
                base
            } else {
                0
            },
            closed: closed.lkey,
            cqs,
            flag,
            srq,
            xrc,
            dead: vec![false; buffers.len()],
            full: vec![false; buffers.len()],
            peer: Export::default(),
            hole: hole(program, side, &buffers),
            qps: Vec::new(),
            buffers,
            events: Vec::new(),
            naps: rng.fork(),
            wake: None,
            blocked: false,
        };
        for connection in &program.connections {
            let init = QpInit {
                pd: Some(pd),
                qp_type: program.transport,
                cap: QpCap {
                    max_send_wr: connection.depth,
                    max_recv_wr: (connection.streams[1 - side].receives.len() as u32).max(1),
                    max_send_sge: 4,
                    max_recv_sge: 3,
                    max_inline_data: 64,
                },
                send_cq: Some(node.cqs[0].clone()),
                recv_cq: Some(node.cqs[node.cqs.len() - 1].clone()),
                srq,
                xrcd: None,
                sq_sig_all: connection.sig_all,
            };
            let (qpn, _) = ok("create_qp", node.device.create_qp(init.clone()))?;
            let target = match &node.xrc {
                None => qpn,
                Some(xrc) => {
                    let init = QpInit {
                        qp_type: QpType::XrcRecv,
                        xrcd: Some(xrc.domains[0]),
                        ..init
                    };
                    ok("create_qp", node.device.create_qp(init))?.0
                }
            };
            node.qps.push(QpLog {
                qpn,
                target,
                ..QpLog::default()
            });
        }
        Ok(node)
    }

    /// What the peer must know.
    pub fn export(&self) -> Export {
        let slots = |buffers: &Buffers| {
            let addr = |slot: &Buffer| slot.sges[0].addr - self.origin;
            buffers.slots.iter().map(addr).collect()
        };
        let keys = |buffers: &Buffers| buffers.windows.iter().map(|(_, key)| key & !0xff).collect();
        let connections = self
            .qps
            .iter()
            .zip(&self.buffers)
            .map(|(qp, b)| (qp.qpn, qp.target, slots(b), keys(b)));
        let strangers = self.xrc.iter().flat_map(|xrc| &xrc.strangers);
        Export {
            connections: connections.collect(),
            srqs: self.srqs(),
            // And one that does not exist.
            strangers: strangers.map(|srq| srq.0).chain([0xff_ffff]).collect(),
            rkey: self.rkey,
        }
    }

    /// Brings every QP to RTS.
    pub fn connect(&mut self, program: &Program, peer: Export) -> Result<(), String> {
        use QpAttrMask as M;
        let side = self.side;
        for (i, connection) in program.connections.iter().enumerate() {
            let attr = QpAttr {
                state: QpState::Init,
                port: 1,
                qkey: QKEY,
                access: if program.is_reliable() {
                    REMOTE | Access::FLUSH_GLOBAL
                } else {
                    Access::REMOTE_WRITE
                },
                path_mtu: program.mtu,
                dest_qpn: peer.connections[i].1,
                rq_psn: connection.psn[1 - side],
                sq_psn: connection.psn[side],
                path: Some(path(program, side)),
                max_rd_atomic: connection.rd_atomic,
                max_dest_rd_atomic: connection.rd_atomic,
                min_rnr_timer: connection.min_rnr_timer,
                timeout: connection.timeout,
                retry_cnt: connection.retry_cnt,
                rnr_retry: connection.rnr_retry,
                ..QpAttr::default()
            };
            let rtr = QpAttr {
                state: QpState::Rtr,
                ..attr
            };
            let rts = QpAttr {
                state: QpState::Rts,
                ..attr
            };
            let init = M::STATE | M::PKEY_INDEX | M::PORT;
            let connected = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
            let steps = match program.transport {
                QpType::Ud => [
                    (attr, init | M::QKEY),
                    (rtr, M::STATE),
                    (rts, M::STATE | M::SQ_PSN),
                ],
                QpType::Uc => [
                    (attr, init | M::ACCESS_FLAGS),
                    (rtr, connected),
                    (rts, M::STATE | M::SQ_PSN),
                ],
                _ => [
                    (attr, init | M::ACCESS_FLAGS),
                    (rtr, connected | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
                    (
                        rts,
                        M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
                    ),
                ],
            };
            let QpLog { qpn, target, .. } = self.qps[i];
            for (attr, mask) in steps {
                ok("modify_qp", self.device.modify_qp(Time::ZERO, qpn, &attr, mask))?;
                if target != qpn {
                    let dest_qpn = peer.connections[i].0;
                    let attr = QpAttr { dest_qpn, ..attr };
                    let modified = self.device.modify_qp(Time::ZERO, target, &attr, mask);
                    ok("modify_qp of a target", modified)?;
                }
            }
        }
        if program.multicast {
            for (i, qp) in self.qps.iter().enumerate() {
                let group = program.group(side, i);
                ok("attach", self.device.attach_multicast(qp.qpn, group))?;
                self.link.join(group, 1).map_err(|e| e.to_string())?;
            }
        }
        self.peer = peer;
        Ok(())
    }

    /// Ends everything in order: QPs to ERR, where all that is left flushes, then every object is destroyed.
    pub fn end(&mut self, program: &Program, now: Time) -> Result<(), String> {
        self.flag.store(true, Ordering::Relaxed);
        self.poll(program, now)?;
        for i in 0..self.qps.len() {
            let qpn = self.qps[i].qpn;
            let attr = QpAttr {
                state: QpState::Err,
                ..QpAttr::default()
            };
            ok(
                "modify_qp to ERR",
                self.device.modify_qp(now, qpn, &attr, QpAttrMask::STATE),
            )?;
            // Posting in ERR is allowed, and flushes at once. What was flushed before makes room when it is polled.
            self.flag.store(true, Ordering::Relaxed);
            self.poll(program, now)?;
            let sends = program.connections[i].streams[self.side].messages.len();
            let wr = SendWr {
                wr_id: wr_id(i, sends),
                operation: Operation::Send,
                flags: SendFlags::empty(),
                sges: &[],
                ud: self.destination(program, i),
                ..SendWr::default()
            };
            ok("post_send in ERR", self.device.post_send(now, qpn, &wr))?;
            let target = self.qps[i].target;
            if target != qpn {
                let modified = self.device.modify_qp(now, target, &attr, QpAttrMask::STATE);
                ok("modify_qp of a target to ERR", modified)?;
            }
            if !program.nodes[self.side].shares() {
                let receives = program.connections[i].streams[1 - self.side].receives.len();
                let wr = RecvWr {
                    wr_id: RECEIVE | wr_id(i, receives),
                    sges: &[],
                };
                ok("post_recv in ERR", self.device.post_recv(qpn, &wr))?;
            }
        }
        self.flag.store(true, Ordering::Relaxed);
        self.poll(program, now)?;
        while let Some(event) = self.device.take_event() {
            self.events.push(event);
        }
        if self.device.transmit(now, &mut self.link) != Progress::Idle {
            return Err("QPs in ERR still transmit".into());
        }
        // Deadlines may be stale, but nothing sets new ones.
        let mut deadlines = 0;
        while let Some(deadline) = self.device.next_deadline() {
            self.device.handle_timeouts(deadline);
            deadlines += 1;
            if deadlines > 1000 {
                return Err("QPs in ERR still set timers".into());
            }
        }
        for (i, qp) in self.qps.iter().enumerate() {
            if program.multicast {
                if self.device.destroy_qp(now, qp.qpn) != Err(VerbsError::Busy) {
                    return Err("a QP that is attached is destroyed".into());
                }
                let group = program.group(self.side, i);
                ok("detach", self.device.detach_multicast(qp.qpn, group))?;
            }
            ok("destroy_qp", self.device.destroy_qp(now, qp.qpn))?;
            if qp.target != qp.qpn {
                ok("destroy_qp", self.device.destroy_qp(now, qp.target))?;
            }
        }
        if let Some(xrc) = self.xrc.take() {
            for srq in xrc.srqs.into_iter().chain(xrc.strangers) {
                ok("destroy_srq", self.device.destroy_srq(srq))?;
            }
            for xrcd in xrc.domains {
                ok("close_xrcd", self.device.close_xrcd(xrcd))?;
            }
        }
        for cq in self.cqs.drain(..) {
            if !cq.is_empty() {
                return Err("completions are left over".into());
            }
            ok("destroy_cq", self.device.destroy_cq(&cq))?;
        }
        if let Some(srq) = self.srq {
            ok("destroy_srq", self.device.destroy_srq(srq))?;
        }
        for (window, _) in self.buffers.iter().flat_map(|b| &b.windows) {
            ok("dealloc_mw", self.device.dealloc_mw(*window))?;
        }
        ok("dereg_mr", self.device.dereg_mr(self.closed))?;
        ok("dereg_mr", self.device.dereg_mr(self.lkey))?;
        ok("dealloc_pd", self.device.dealloc_pd(self.pd))?;
        for (qp, buffers) in self.qps.iter_mut().zip(&self.buffers) {
            qp.slots = buffers.slots.iter().map(|slot| self.arena.take(slot)).collect();
        }
        self.arena.check_guards()
    }
}

/// What a node unmaps, and when, if the program's hole lies in its memory.
fn hole(program: &Program, side: usize, buffers: &[Buffers]) -> Option<(Time, u64, usize)> {
    let hole = program.hole?;
    let of = &buffers[hole.connection];
    let buffer = match hole.place {
        Place::Message(i) if side == hole.side => of.sends.get(i),
        Place::Receive(i) if side != hole.side => of.receives.get(i),
        Place::Slot(i) if side != hole.side => of.slots.get(i),
        _ => None,
    };
    let piece = buffer?.sges.iter().find(|sge| sge.length > 0)?;
    Some((
        Time::from_nanos(hole.at * 1000),
        piece.addr,
        piece.length as usize,
    ))
}

/// The domains and shared receive queues of a node with XRC QPs. Their receives complete on the last of its CQs, each on
/// one of its own where there are enough.
fn xrc(device: &mut Device, pd: PdId, count: usize, receives: u32, cqs: &[Arc<Cq>]) -> Result<Xrc, String> {
    let mut domain = || ok("open_xrcd", device.open_xrcd(None, true, false));
    let domains = [domain()?, domain()?];
    let depth = receives.max(1);
    let last = cqs.len() - 1;
    let mut srqs = Vec::new();
    for n in 0..count {
        let cq = &cqs[last.min(n + 1)];
        let srq = device.create_xrc_srq(pd, domains[0], cq, depth, 3);
        srqs.push(ok("create_xrc_srq", srq)?);
    }
    let other = device.create_xrc_srq(pd, domains[1], &cqs[last], 1, 1);
    let plain = device.create_srq(pd, 1, 1, 0);
    Ok(Xrc {
        domains,
        srqs,
        strangers: vec![ok("create_xrc_srq", other)?, ok("create_srq", plain)?],
    })
}
