//! Commands reach the daemon as they are meant, and bad ones are refused as by the kernel.

use super::*;

#[test]
fn ids_are_made_and_destroyed() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    let made = |port_space, qp_kind| Command::Create { port_space, qp_kind };
    assert_eq!(daemon.command(), made(PortSpace::Tcp, QpKind::Rc));
    program.create(1, 0x0111).unwrap();
    assert_eq!(daemon.command(), made(PortSpace::Udp, QpKind::Ud));
    program.create(1, 2).unwrap();
    assert_eq!(daemon.command(), made(PortSpace::Ipoib, QpKind::Ud));
    program.create(1, 0x013f).unwrap();
    assert_eq!(daemon.command(), made(PortSpace::Ib, QpKind::XrcInitiator));
    assert_eq!(program.create(1, 7), Err(libc::EINVAL));
    daemon.answer(Err(libc::ENOMEM));
    assert_eq!(program.create(1, TCP), Err(libc::ENOMEM));
    daemon.command();
    assert_eq!(program.end(cmd::DESTROY_ID, id), Ok(0));
    assert_eq!(daemon.command(), Command::Destroy { id });
    assert_eq!(program.end(cmd::DESTROY_ID, id), Err(libc::ENOENT));
    assert!(daemon.idle());
    program.close();
}

#[test]
fn an_id_without_a_place_for_its_number_does_not_stay() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let body = rdma_ucm_create_id {
        response: 8,
        ps: TCP,
        ..rdma_ucm_create_id::zeroed()
    };
    assert_eq!(program.call(cmd::CREATE_ID, &body, 3), Err(libc::ENOSPC));
    assert_eq!(program.call(cmd::CREATE_ID, &body, 4), Err(libc::EFAULT));
    assert!(matches!(daemon.command(), Command::Create { .. }));
    assert!(matches!(daemon.command(), Command::Destroy { .. }));
    program.close();
}

#[test]
fn what_is_no_command() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    assert_eq!(program.write(&[0; 7]), Err(libc::EINVAL));
    assert_eq!(program.call_bytes(cmd::END, &[], 0), Err(libc::EINVAL));
    assert_eq!(
        program.call_bytes(cmd::GET_OPTION, &[0; 64], 64),
        Err(libc::ENOSYS)
    );
    // The header says more than there is.
    assert_eq!(
        program.write(&[10, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0]),
        Err(libc::EINVAL)
    );
    // SAFETY: nothing is there, which is to be found.
    let written = unsafe { rdmacm::write(program.0, 8 as *const c_void, 16) };
    assert_eq!(written, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    // Every command is refused that is cut short.
    for cmd in 0..cmd::END {
        let expected = if cmd == cmd::GET_OPTION {
            libc::ENOSYS
        } else {
            libc::EINVAL
        };
        assert_eq!(program.call_bytes(cmd, &[0; 3], 4096), Err(expected), "{cmd}");
    }
    assert!(daemon.idle());
    program.close();
}

#[test]
fn ids_are_of_one_channel() {
    let (process, daemon) = start();
    let (program, other) = (Program::new(process, NONBLOCK), Program::new(process, NONBLOCK));
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let disconnect = rdma_ucm_disconnect { id };
    assert_eq!(other.call(cmd::DISCONNECT, &disconnect, 0), Err(libc::EINVAL));
    assert_eq!(other.end(cmd::DESTROY_ID, id), Err(libc::EINVAL));
    assert_eq!(program.call(cmd::DISCONNECT, &disconnect, 0), Ok(()));
    assert_eq!(daemon.command(), Command::Disconnect { id });
    let unknown = rdma_ucm_disconnect { id: 999 };
    assert_eq!(program.call(cmd::DISCONNECT, &unknown, 0), Err(libc::ENOENT));
    other.close();
    program.close();
    assert_eq!(daemon.command(), Command::Destroy { id });
}

#[test]
fn addresses_in_both_forms() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let (addr, addr_size) = storage("10.0.0.1:7471");
    let (dst_addr, dst_size) = storage("[fd00::1]:7471");
    let bind = Command::Bind {
        id,
        address: ip("10.0.0.1:7471"),
    };
    let body = rdma_ucm_bind {
        id,
        addr_size,
        reserved: 0,
        addr,
    };
    assert_eq!(program.call(cmd::BIND, &body, 0), Ok(()));
    assert_eq!(daemon.command(), bind);
    for bad in [
        rdma_ucm_bind { reserved: 1, ..body },
        rdma_ucm_bind {
            addr_size: 28,
            ..body
        },
        rdma_ucm_bind { addr_size: 0, ..body },
    ] {
        assert_eq!(program.call(cmd::BIND, &bad, 0), Err(libc::EINVAL));
    }
    let body = rdma_ucm_bind_ip {
        response: 0,
        addr: address::to_in6(Some(&ip("10.0.0.1:7471"))),
        id,
    };
    assert_eq!(program.call(cmd::BIND_IP, &body, 0), Ok(()));
    assert_eq!(daemon.command(), bind);
    let resolve = |source: Option<&str>| Command::ResolveAddress {
        id,
        source: source.map(ip),
        dest: ip("[fd00::1]:7471"),
        timeout_ms: 2000,
    };
    let body = rdma_ucm_resolve_addr {
        id,
        timeout_ms: 2000,
        src_size: 0,
        dst_size,
        reserved: 0,
        src_addr: addr,
        dst_addr,
    };
    assert_eq!(program.call(cmd::RESOLVE_ADDR, &body, 0), Ok(()));
    assert_eq!(daemon.command(), resolve(None));
    let with_source = rdma_ucm_resolve_addr {
        src_size: addr_size,
        ..body
    };
    assert_eq!(program.call(cmd::RESOLVE_ADDR, &with_source, 0), Ok(()));
    assert_eq!(daemon.command(), resolve(Some("10.0.0.1:7471")));
    let bad = rdma_ucm_resolve_addr { dst_size: 0, ..body };
    assert_eq!(program.call(cmd::RESOLVE_ADDR, &bad, 0), Err(libc::EINVAL));
    let body = rdma_ucm_resolve_ip {
        src_addr: sockaddr_in6::zeroed(),
        dst_addr: address::to_in6(Some(&ip("[fd00::1]:7471"))),
        id,
        timeout_ms: 2000,
    };
    assert_eq!(program.call(cmd::RESOLVE_IP, &body, 0), Ok(()));
    assert_eq!(daemon.command(), resolve(None));
    let bad = rdma_ucm_resolve_ip {
        dst_addr: sockaddr_in6::zeroed(),
        ..body
    };
    assert_eq!(program.call(cmd::RESOLVE_IP, &bad, 0), Err(libc::EINVAL));
    let body = rdma_ucm_resolve_route { id, timeout_ms: 5 };
    assert_eq!(program.call(cmd::RESOLVE_ROUTE, &body, 0), Ok(()));
    assert_eq!(daemon.command(), Command::ResolveRoute { id, timeout_ms: 5 });
    assert!(daemon.idle());
    program.close();
}

fn parameters() -> Parameters {
    Parameters {
        qpn: 0x12_3456,
        qkey: 0,
        private_data: b"abc".to_vec(),
        responder_resources: 4,
        initiator_depth: 5,
        flow_control: true,
        retry_count: 7,
        rnr_retry_count: 6,
        srq: true,
    }
}

#[test]
fn connections_are_asked_for_and_accepted() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let ece = Ece {
        vendor_id: 1,
        attr_mod: 2,
    };
    let connect = rdma_ucm_connect {
        conn_param: conn_param(),
        id,
        reserved: 0,
        ece: rdma_ucm_ece {
            vendor_id: 1,
            attr_mod: 2,
        },
    };
    let parameters = parameters();
    assert_eq!(program.call(cmd::CONNECT, &connect, 0), Ok(()));
    let expected = |ece| Command::Connect {
        id,
        parameters: parameters.clone(),
        ece,
    };
    assert_eq!(daemon.command(), expected(ece));
    // Older programs end before the options.
    let old = &connect.bytes()[..280];
    assert_eq!(program.call_bytes(cmd::CONNECT, old, 0), Ok(()));
    assert_eq!(daemon.command(), expected(Ece::default()));
    assert_eq!(
        program.call_bytes(cmd::CONNECT, &old[..279], 0),
        Err(libc::EINVAL)
    );
    let mut invalid = connect;
    invalid.conn_param.valid = 0;
    assert_eq!(program.call(cmd::CONNECT, &invalid, 0), Err(libc::EINVAL));

    let accept = rdma_ucm_accept {
        uid: 5,
        conn_param: conn_param(),
        id,
        reserved: 0,
        ece: connect.ece,
    };
    assert_eq!(program.call(cmd::ACCEPT, &accept, 0), Ok(()));
    let expected = |parameters, ece| Command::Accept { id, parameters, ece };
    assert_eq!(daemon.command(), expected(Some(parameters.clone()), ece));
    let mut bare = accept;
    bare.conn_param.valid = 0;
    assert_eq!(program.call_bytes(cmd::ACCEPT, &bare.bytes()[..288], 0), Ok(()));
    assert_eq!(daemon.command(), expected(None, Ece::default()));

    let mut reject = rdma_ucm_reject {
        id,
        private_data_len: 2,
        ..rdma_ucm_reject::zeroed()
    };
    reject.private_data[..2].copy_from_slice(b"no");
    for (asked, reason) in [(0, 28), (28, 28), (35, 35)] {
        reject.reason = asked;
        assert_eq!(program.call(cmd::REJECT, &reject, 0), Ok(()));
        let private_data = b"no".to_vec();
        let expected = Command::Reject {
            id,
            reason,
            private_data,
        };
        assert_eq!(daemon.command(), expected);
    }
    reject.reason = 10;
    assert_eq!(program.call(cmd::REJECT, &reject, 0), Err(libc::EINVAL));
    let listen = rdma_ucm_listen {
        id,
        backlog: (-1i32).cast_unsigned(),
    };
    assert_eq!(program.call(cmd::LISTEN, &listen, 0), Ok(()));
    assert_eq!(daemon.command(), Command::Listen { id, backlog: -1 });
    assert_eq!(
        program.call(cmd::NOTIFY, &rdma_ucm_notify { id, event: 5 }, 0),
        Ok(())
    );
    assert_eq!(daemon.command(), Command::Notify { id, event: 5 });
    daemon.answer(Err(libc::EADDRINUSE));
    assert_eq!(program.call(cmd::LISTEN, &listen, 0), Err(libc::EADDRINUSE));
    program.close();
}

#[test]
fn queries_are_answered_with_what_there_is_room_for() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    let route = Route {
        node_guid: Some(7),
        port: 1,
        source: Some(ip("10.0.0.1:1")),
        pkey: 0xffff,
        path: Some(PathRecord::default()),
        ..Route::default()
    };
    let query = |cmd, option, room: usize| {
        daemon.answer(Ok(Answer::Route(Box::new(route.clone()))));
        // One byte off, and a guard behind it.
        let mut response = vec![0xeeu8; room + 2];
        let body = rdma_ucm_query {
            response: response.as_mut_ptr() as u64 + 1,
            id,
            option,
        };
        let result = program.call(cmd, &body, room);
        assert_eq!((response[0], response[room + 1]), (0xee, 0xee));
        result.map(|()| response[1..=room].to_vec())
    };
    let whole = query(cmd::QUERY_ROUTE, 0, 208).unwrap();
    assert_eq!(whole[..8], [0, 0, 0, 0, 0, 0, 0, 7]);
    assert_eq!(query(cmd::QUERY_ROUTE, 0, 200).unwrap(), whole[..200]);
    let whole = query(cmd::QUERY, 0, 280).unwrap();
    assert_eq!(query(cmd::QUERY, 0, 272).unwrap(), whole[..272]);
    assert_eq!(query(cmd::QUERY, 2, 280).unwrap()[16], 27);
    let paths = query(cmd::QUERY, 1, 8 + 6 * 72).unwrap();
    assert_eq!(paths[..4], [1, 0, 0, 0]);
    assert_eq!(paths[80..], [0xee; 5 * 72], "no more than there are");
    // The answers that are not fetched stay with the daemon of the test, so these come last.
    assert_eq!(query(cmd::QUERY_ROUTE, 0, 199).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 0, 271).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 1, 7).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 3, 3).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 3, 64).unwrap_err(), libc::ENODATA);
    assert_eq!(query(cmd::QUERY, 4, 64).unwrap_err(), libc::ENOSYS);
}

#[test]
fn attributes_options_and_services() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let mut attributes = ib_uverbs_qp_attr::zeroed();
    let mut body = rdma_ucm_init_qp_attr {
        response: &raw mut attributes as u64,
        id,
        qp_state: 2,
    };
    daemon.answer(Ok(Answer::QpAttributes(Box::new(QpAttributes {
        mask: 3,
        timeout: 19,
        ..QpAttributes::default()
    }))));
    assert_eq!(program.call(cmd::INIT_QP_ATTR, &body, 144), Ok(()));
    let state = TargetState::Rtr;
    assert_eq!(daemon.command(), Command::QpAttributes { id, state });
    assert_eq!((attributes.qp_attr_mask, attributes.timeout), (3, 19));
    assert_eq!(program.call(cmd::INIT_QP_ATTR, &body, 143), Err(libc::ENOSPC));
    body.qp_state = 7;
    assert_eq!(program.call(cmd::INIT_QP_ATTR, &body, 144), Err(libc::EINVAL));

    let tos = 8u8;
    let mut option = rdma_ucm_set_option {
        optval: &raw const tos as u64,
        id,
        level: 0,
        optname: 0,
        optlen: 1,
    };
    assert_eq!(program.call(cmd::SET_OPTION, &option, 0), Ok(()));
    let expected = Command::SetOption {
        id,
        option: IdOption::TypeOfService(8),
    };
    assert_eq!(daemon.command(), expected);
    option.optname = 9;
    assert_eq!(program.call(cmd::SET_OPTION, &option, 0), Err(libc::ENOSYS));
    option.id = 999;
    assert_eq!(program.call(cmd::SET_OPTION, &option, 0), Err(libc::ENOENT));

    let service = rdma_ucm_resolve_ib_service {
        id,
        ..rdma_ucm_resolve_ib_service::zeroed()
    };
    assert_eq!(
        program.call(cmd::RESOLVE_IB_SERVICE, &service, 0),
        Err(libc::EINVAL)
    );
    daemon.answer(Ok(Answer::Route(Box::new(Route {
        node_guid: Some(1),
        ..Route::default()
    }))));
    assert_eq!(
        program.call(cmd::RESOLVE_IB_SERVICE, &service, 0),
        Err(libc::EOPNOTSUPP)
    );
    program.close();
}

#[test]
fn groups_are_joined_and_left() {
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let id = program.create(1, 0x0111).unwrap();
    daemon.command();
    let (addr, addr_size) = storage("239.1.2.3:0");
    let mut response = rdma_ucm_create_id_resp { id: 0 };
    let mut body = rdma_ucm_join_mcast {
        response: &raw mut response as u64,
        uid: 4040,
        id,
        addr_size,
        join_flags: 1,
        addr,
    };
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 4), Ok(()));
    let address = ip("239.1.2.3:0");
    let join = |send_only| Command::Join {
        id,
        address,
        send_only,
    };
    assert_eq!(daemon.command(), join(true));
    let membership = response.id;
    daemon.event(id, EventKind::MulticastJoin, None, Some(membership));
    let event = program.event().unwrap();
    assert_eq!((event.uid, event.id, event.event), (4040, membership, 12));
    body.join_flags = 2;
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 4), Err(libc::EINVAL));
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 3), Err(libc::ENOSPC));
    let old = rdma_ucm_join_ip_mcast {
        response: &raw mut response as u64,
        uid: 5050,
        addr: address::to_in6(Some(&address)),
        id,
    };
    assert_eq!(program.call(cmd::JOIN_IP_MCAST, &old, 4), Ok(()));
    assert_eq!(daemon.command(), join(false));
    assert_eq!(program.end(cmd::LEAVE_MCAST, membership), Ok(1));
    assert_eq!(daemon.command(), Command::Leave { membership });
    assert_eq!(program.end(cmd::LEAVE_MCAST, membership), Err(libc::ENOENT));
    body.join_flags = 0;
    body.response = 8;
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 4), Err(libc::EFAULT));
    assert_eq!(daemon.command(), join(false));
    assert!(matches!(daemon.command(), Command::Leave { .. }));
    assert_eq!(program.end(cmd::DESTROY_ID, id), Ok(1));
    program.close();
}
