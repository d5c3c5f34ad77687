//! The commands of a channel: checked as the kernel does, and given to the daemon.

use std::ffi::c_int;
use std::mem::{offset_of, size_of};
use std::os::fd::BorrowedFd;

use ferroce_engine::rdma_cm::{
    Address, Answer, Command, Ece, Id, MembershipId, Parameters, PortSpace, QpKind, TargetState,
};

use super::layout::*;
use super::state::{Phase, Subject};
use super::user::{self, Result};
use super::{Channel, Wanted, address, events, options, query};
use crate::hooks::descriptors;

/// `IB_CM_REJ_CONSUMER_DEFINED`.
const REJECTED_BY_CONSUMER: u8 = 28;
/// `IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED`.
const REJECTED_VENDOR_OPTION: u8 = 35;
/// `RDMA_CM_EVENT_USER` and `RDMA_CM_EVENT_INTERNAL`: the events that programs make.
const OWN_EVENTS: std::ops::RangeInclusive<u32> = 18..=19;
/// `IBV_QPS_INIT`, `IBV_QPS_RTR`, `IBV_QPS_RTS`.
const TARGETS: [(u32, TargetState); 3] = [
    (1, TargetState::Init),
    (2, TargetState::Rtr),
    (3, TargetState::Rts),
];

/// A command in the program's memory.
pub(super) struct Call {
    /// Where its structure is.
    body: u64,
    /// How long that is.
    length: u16,
    /// Room for the response.
    pub(super) room: u16,
}

impl Call {
    /// The command's structure.
    pub(super) fn argument<T: Plain>(&self) -> Result<T> {
        self.argument_from(size_of::<T>())
    }

    /// The command's structure, which older programs end after `least` bytes; zeros follow then.
    fn argument_from<T: Plain>(&self, least: usize) -> Result<T> {
        let length = usize::from(self.length);
        if length < least {
            return Err(libc::EINVAL);
        }
        let mut argument = T::zeroed();
        let length = length.min(size_of::<T>());
        user::read_bytes(self.body, &mut argument.bytes_mut()[..length])?;
        Ok(argument)
    }

    /// Checks that the response has room for `least` bytes.
    pub(super) fn fits(&self, least: usize) -> Result<()> {
        if usize::from(self.room) < least {
            return Err(libc::ENOSPC);
        }
        Ok(())
    }

    /// Stores the response.
    pub(super) fn respond<T: Plain>(&self, response: u64, value: &T) -> Result<()> {
        user::write(response, value, self.room)
    }
}

impl Channel {
    /// Does the command of `length` bytes at an address; one that wants an event is to be gone on with.
    pub(super) fn command(&self, bytes: u64, length: usize) -> Result<Option<Wanted>> {
        const HEADER: usize = size_of::<rdma_ucm_cmd_hdr>();
        if length < HEADER {
            return Err(libc::EINVAL);
        }
        let header: rdma_ucm_cmd_hdr = user::read(bytes)?;
        if header.cmd >= cmd::END || usize::from(header.in_) + HEADER > length {
            return Err(libc::EINVAL);
        }
        let call = Call {
            body: bytes + HEADER as u64,
            length: header.in_,
            room: header.out,
        };
        match header.cmd {
            cmd::CREATE_ID => self.create(&call)?,
            cmd::DESTROY_ID => self.destroy_id(&call)?,
            cmd::BIND_IP => {
                let argument: rdma_ucm_bind_ip = call.argument()?;
                self.bind(argument.id, address::from_in6(&argument.addr)?)?;
            }
            cmd::BIND => {
                let argument: rdma_ucm_bind = call.argument()?;
                if argument.reserved != 0 {
                    return Err(libc::EINVAL);
                }
                self.bind(
                    argument.id,
                    address::from_storage(&argument.addr, argument.addr_size)?,
                )?;
            }
            cmd::RESOLVE_IP => {
                let argument: rdma_ucm_resolve_ip = call.argument()?;
                let source = match argument.src_addr.family {
                    0 => None,
                    _ => Some(address::from_in6(&argument.src_addr)?),
                };
                let dest = address::from_in6(&argument.dst_addr)?;
                self.resolve_address(argument.id, source, dest, argument.timeout_ms)?;
            }
            cmd::RESOLVE_ADDR => {
                let argument: rdma_ucm_resolve_addr = call.argument()?;
                if argument.reserved != 0 {
                    return Err(libc::EINVAL);
                }
                let source = match argument.src_size {
                    0 => None,
                    size => Some(address::from_storage(&argument.src_addr, size)?),
                };
                let dest = address::from_storage(&argument.dst_addr, argument.dst_size)?;
                self.resolve_address(argument.id, source, dest, argument.timeout_ms)?;
            }
            cmd::RESOLVE_ROUTE => {
                let rdma_ucm_resolve_route { id, timeout_ms } = call.argument()?;
                self.begin(id, Phase::Route, Command::ResolveRoute { id, timeout_ms })?;
            }
            cmd::QUERY_ROUTE => self.query_route(&call)?,
            cmd::QUERY => self.query(&call)?,
            cmd::CONNECT => self.connect(&call)?,
            cmd::LISTEN => {
                let rdma_ucm_listen { id, backlog } = call.argument()?;
                let backlog = backlog.cast_signed();
                self.done(id, Command::Listen { id, backlog })?;
            }
            cmd::ACCEPT => self.accept(&call)?,
            cmd::REJECT => self.reject(&call)?,
            cmd::DISCONNECT => {
                let rdma_ucm_disconnect { id } = call.argument()?;
                self.done(id, Command::Disconnect { id })?;
            }
            cmd::INIT_QP_ATTR => self.qp_attributes(&call)?,
            cmd::GET_EVENT => {
                call.fits(events::SHORTEST)?;
                let rdma_ucm_get_event { response } = call.argument()?;
                return Ok(Some(Wanted {
                    channel: self.number,
                    response,
                    room: call.room,
                }));
            }
            cmd::SET_OPTION => {
                let argument: rdma_ucm_set_option = call.argument()?;
                self.known(argument.id)?;
                let option = options::parse(&argument)?;
                let id = argument.id;
                self.done(id, Command::SetOption { id, option })?;
            }
            cmd::NOTIFY => {
                let rdma_ucm_notify { id, event } = call.argument()?;
                self.done(id, Command::Notify { id, event })?;
            }
            cmd::JOIN_IP_MCAST => {
                call.fits(size_of::<rdma_ucm_create_id_resp>())?;
                let argument: rdma_ucm_join_ip_mcast = call.argument()?;
                let group = address::from_in6(&argument.addr)?;
                self.join(&call, argument.response, argument.uid, argument.id, group, false)?;
            }
            cmd::JOIN_MCAST => {
                call.fits(size_of::<rdma_ucm_create_id_resp>())?;
                let argument: rdma_ucm_join_mcast = call.argument()?;
                let group = address::from_storage(&argument.addr, argument.addr_size)?;
                let send_only = match argument.join_flags {
                    0 => false,
                    1 => true,
                    _ => return Err(libc::EINVAL),
                };
                self.join(
                    &call,
                    argument.response,
                    argument.uid,
                    argument.id,
                    group,
                    send_only,
                )?;
            }
            cmd::LEAVE_MCAST => self.leave(&call)?,
            cmd::MIGRATE_ID => self.migrate(&call)?,
            cmd::RESOLVE_IB_SERVICE => {
                // Only InfiniBand has service records; an id must have a device to be told so.
                let argument: rdma_ucm_resolve_ib_service = call.argument()?;
                let route = self.route(argument.id)?;
                return Err(match route.node_guid {
                    Some(_) => libc::EOPNOTSUPP,
                    None => libc::EINVAL,
                });
            }
            cmd::WRITE_CM_EVENT => {
                let argument: rdma_ucm_write_cm_event = call.argument()?;
                if !OWN_EVENTS.contains(&argument.event) {
                    return Err(libc::EINVAL);
                }
                let mut state = self.process.state.lock();
                let rdma_ucm_write_cm_event {
                    event, status, arg, ..
                } = argument;
                state.deliver_own(argument.id, self.number, event, status, arg)?;
            }
            // GET_OPTION, which no kernel has.
            _ => return Err(libc::ENOSYS),
        }
        Ok(None)
    }

    /// Checks that the id is one of this channel, for a command.
    fn known(&self, id: Id) -> Result<()> {
        self.process.state.lock().id(id, self.number).map(drop)
    }

    /// Gives the daemon a command for an id of this channel.
    pub(super) fn ask(&self, id: Id, command: Command) -> Result<Answer> {
        self.known(id)?;
        self.process.session()?.ask(command)
    }

    /// As [`Channel::ask`], of a command that gives nothing.
    fn done(&self, id: Id, command: Command) -> Result<()> {
        self.ask(id, command).map(drop)
    }

    /// As [`Channel::done`], of a command that leaves the id waiting for something.
    fn begin(&self, id: Id, phase: Phase, command: Command) -> Result<()> {
        self.known(id)?;
        self.process.state.lock().set_phase(id, phase);
        let result = self.process.session()?.ask(command);
        if result.is_err() {
            self.process.state.lock().set_phase(id, Phase::Idle);
        }
        result.map(drop)
    }

    fn create(&self, call: &Call) -> Result<()> {
        call.fits(size_of::<rdma_ucm_create_id_resp>())?;
        let argument: rdma_ucm_create_id = call.argument()?;
        let port_space = PortSpace::from_number(argument.ps.into()).ok_or(libc::EINVAL)?;
        let qp_kind = match port_space {
            PortSpace::Tcp => QpKind::Rc,
            PortSpace::Udp | PortSpace::Ipoib => QpKind::Ud,
            PortSpace::Ib => QpKind::from_number(argument.qp_type.into()).ok_or(libc::EINVAL)?,
        };
        let (process, channel, uid) = (self.process, self.number, argument.uid);
        let command = Command::Create { port_space, qp_kind };
        let created = process.session()?.start(command, move |outcome| {
            if let Ok(Answer::Created(id)) = outcome {
                process
                    .state
                    .lock()
                    .add_id(*id, channel, uid, port_space, qp_kind);
            }
        });
        let Answer::Created(id) = created.wait()? else {
            return Err(libc::EIO);
        };
        let stored = call.respond(argument.response, &rdma_ucm_create_id_resp { id });
        let closed = !process.state.lock().has_channel(channel);
        if stored.is_err() || closed {
            self.destroy(id);
        }
        stored
    }

    /// Destroys an id; gives the number of its events that the program has got.
    fn destroy(&self, id: Id) -> u32 {
        let destroyed = self.process.state_after_reader(Subject::Id(id)).destroy(id);
        if let Ok(session) = self.process.session() {
            // Here the id is gone, whatever the daemon says. It destroys the requests that were not taken as well; one
            // that does not know them yet never hears of them.
            _ = session.ask(Command::Destroy { id });
            for id in destroyed.undelivered {
                session.forget(id);
            }
        }
        destroyed.reported
    }

    fn destroy_id(&self, call: &Call) -> Result<()> {
        call.fits(size_of::<rdma_ucm_destroy_id_resp>())?;
        let argument: rdma_ucm_destroy_id = call.argument()?;
        self.process.state.lock().check_id(argument.id, self.number)?;
        let events_reported = self.destroy(argument.id);
        call.respond(argument.response, &rdma_ucm_destroy_id_resp { events_reported })
    }

    /// Remembers whether the id has an address of InfiniBand.
    fn note_address(&self, id: Id, address: &Address) -> Result<()> {
        let mut state = self.process.state.lock();
        let known = state.id(id, self.number)?;
        known.ib |= matches!(address, Address::Ib(_));
        Ok(())
    }

    fn bind(&self, id: Id, address: Address) -> Result<()> {
        self.note_address(id, &address)?;
        self.done(id, Command::Bind { id, address })
    }

    fn resolve_address(&self, id: Id, source: Option<Address>, dest: Address, timeout_ms: u32) -> Result<()> {
        self.note_address(id, &dest)?;
        let command = Command::ResolveAddress {
            id,
            source,
            dest,
            timeout_ms,
        };
        self.begin(id, Phase::Address, command)
    }

    fn connect(&self, call: &Call) -> Result<()> {
        let argument: rdma_ucm_connect = call.argument_from(offset_of!(rdma_ucm_connect, ece))?;
        if argument.conn_param.valid == 0 {
            return Err(libc::EINVAL);
        }
        let id = argument.id;
        let command = Command::Connect {
            id,
            parameters: self.parameters(id, &argument.conn_param)?,
            ece: ece(&argument.ece),
        };
        self.begin(id, Phase::Connecting, command)
    }

    fn accept(&self, call: &Call) -> Result<()> {
        let argument: rdma_ucm_accept = call.argument_from(offset_of!(rdma_ucm_accept, ece))?;
        let id = argument.id;
        let parameters = match argument.conn_param.valid {
            0 => None,
            _ => Some(self.parameters(id, &argument.conn_param)?),
        };
        self.known(id)?;
        // Only now the program has a name for an id that came with a request.
        let uid = parameters.is_some().then_some(argument.uid);
        let process = self.process;
        let command = Command::Accept {
            id,
            parameters,
            ece: ece(&argument.ece),
        };
        let accepted = process.session()?.start(command, move |outcome| {
            if let (Ok(_), Some(uid)) = (outcome, uid) {
                let mut state = process.state.lock();
                state.set_uid(id, uid);
                state.set_phase(id, Phase::Connecting);
            }
        });
        accepted.wait().map(drop)
    }

    fn reject(&self, call: &Call) -> Result<()> {
        let argument: rdma_ucm_reject = call.argument()?;
        let reason = match argument.reason {
            0 => REJECTED_BY_CONSUMER,
            REJECTED_BY_CONSUMER | REJECTED_VENDOR_OPTION => argument.reason,
            _ => return Err(libc::EINVAL),
        };
        let id = argument.id;
        let private_data = argument.private_data[..argument.private_data_len.into()].to_vec();
        let command = Command::Reject {
            id,
            reason,
            private_data,
        };
        self.done(id, command)
    }

    fn parameters(&self, id: Id, from: &rdma_ucm_conn_param) -> Result<Parameters> {
        let ib = self.process.state.lock().id(id, self.number)?.ib;
        Ok(Parameters {
            qpn: from.qp_num & 0xff_ffff,
            // Programs without addresses of InfiniBand leave garbage there.
            qkey: if ib { from.qkey } else { 0 },
            private_data: from.private_data[..from.private_data_len.into()].to_vec(),
            responder_resources: from.responder_resources,
            initiator_depth: from.initiator_depth,
            flow_control: from.flow_control != 0,
            retry_count: from.retry_count,
            rnr_retry_count: from.rnr_retry_count,
            srq: from.srq != 0,
        })
    }

    fn qp_attributes(&self, call: &Call) -> Result<()> {
        call.fits(size_of::<ib_uverbs_qp_attr>())?;
        let argument: rdma_ucm_init_qp_attr = call.argument()?;
        let (_, state) = TARGETS
            .into_iter()
            .find(|(number, _)| *number == argument.qp_state)
            .ok_or(libc::EINVAL)?;
        let id = argument.id;
        match self.ask(id, Command::QpAttributes { id, state })? {
            Answer::QpAttributes(attributes) => {
                call.respond(argument.response, &query::qp_attributes(&attributes))
            }
            _ => Err(libc::EIO),
        }
    }

    fn join(
        &self,
        call: &Call,
        response: u64,
        uid: u64,
        id: Id,
        group: Address,
        send_only: bool,
    ) -> Result<()> {
        self.known(id)?;
        let process = self.process;
        let command = Command::Join {
            id,
            address: group,
            send_only,
        };
        let joined = process.session()?.start(command, move |outcome| {
            if let Ok(Answer::Joined(membership)) = outcome {
                process.state.lock().add_membership(*membership, id, uid);
            }
        });
        let Answer::Joined(membership) = joined.wait()? else {
            return Err(libc::EIO);
        };
        let stored = call.respond(response, &rdma_ucm_create_id_resp { id: membership });
        if stored.is_err() {
            self.leave_group(membership);
        }
        stored
    }

    fn leave(&self, call: &Call) -> Result<()> {
        call.fits(size_of::<rdma_ucm_destroy_id_resp>())?;
        let argument: rdma_ucm_destroy_id = call.argument()?;
        self.process
            .state
            .lock()
            .check_membership(argument.id, self.number)?;
        let events_reported = self.leave_group(argument.id);
        call.respond(argument.response, &rdma_ucm_destroy_id_resp { events_reported })
    }

    /// Leaves a group; gives the number of the membership's events that the program has got.
    fn leave_group(&self, membership: MembershipId) -> u32 {
        if let Ok(session) = self.process.session() {
            // Here it is left, whatever the daemon says.
            _ = session.ask(Command::Leave { membership });
        }
        self.process
            .state_after_reader(Subject::Membership(membership))
            .leave(membership)
    }

    fn migrate(&self, call: &Call) -> Result<()> {
        let argument: rdma_ucm_migrate_id = call.argument()?;
        let fd = argument.fd.cast_signed();
        let Some(from) = descriptors::get_as::<Channel>(fd).filter(|it| it.process.is_current()) else {
            return Err(not_a_channel(fd));
        };
        self.process.state.lock().id(argument.id, from.number)?;
        let events_reported = self
            .process
            .state_after_reader(Subject::Id(argument.id))
            .migrate(argument.id, from.number, self.number)?;
        call.respond(argument.response, &rdma_ucm_migrate_resp { events_reported })
    }
}

/// Why a descriptor that is no channel can't be migrated from.
fn not_a_channel(fd: c_int) -> c_int {
    if fd < 0 {
        return libc::ENOENT;
    }
    // SAFETY: the descriptor is only asked for its flags, which fails if there is none.
    match rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) }) {
        Ok(_) => libc::EINVAL,
        Err(_) => libc::ENOENT,
    }
}

fn ece(from: &rdma_ucm_ece) -> Ece {
    Ece {
        vendor_id: from.vendor_id,
        attr_mod: from.attr_mod,
    }
}
