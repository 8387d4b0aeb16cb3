//! Both ends of a connection, for real, on loopback.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::io::{Read as _, Write as _};
use std::path::Path;

use stage_net::authority::Authority;
use stage_net::{Conn, Net, NetError, Role};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

fn node(name: &str) -> Role {
    Role::Node(name.parse().unwrap())
}

fn net(authority: &Authority, dir: &Path, role: Role) -> Net {
    let files = authority.write(dir, role).unwrap();
    Net::tls(&files.ca, &files.cert, &files.key).unwrap()
}

async fn pair(server: &Net, client: &Net, role: Role) -> (Result<Conn, NetError>, Result<Conn, NetError>) {
    let listener = server.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address();
    tokio::join!(
        async { listener.accept().await.handshake().await },
        client.dial(address, &role, None)
    )
}

#[tokio::test]
async fn both_know_each_other_and_share_a_binding() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new("c1").unwrap();
    let (a, b) = (
        net(&authority, dir.path(), node("a")),
        net(&authority, dir.path(), node("b")),
    );
    let (server, client) = pair(&a, &b, node("a")).await;
    let (mut server, mut client) = (server.unwrap(), client.unwrap());
    assert_eq!(server.identity().unwrap().role, node("b"));
    assert_eq!(client.identity().unwrap().role, node("a"));
    assert!(server.binding().is_some());
    assert_eq!(server.binding(), client.binding());

    server.write_all(b"async").await.unwrap();
    server.flush().await.unwrap();
    let mut five = [0; 5];
    client.read_exact(&mut five).await.unwrap();
    assert_eq!(&five, b"async");

    // The same connection goes on with blocking calls, both ways, with more than any buffer holds.
    let (mut server, mut client) = (server.into_blocking().unwrap(), client.into_blocking().unwrap());
    let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    let expected = sent.clone();
    let sender = std::thread::spawn(move || {
        server.write_all(&sent).unwrap();
        server.flush().unwrap();
        let mut answer = [0; 2];
        server.read_exact(&mut answer).unwrap();
        answer
    });
    let mut received = vec![0; expected.len()];
    client.read_exact(&mut received).unwrap();
    assert!(received == expected);
    client.write_all(b"ok").unwrap();
    client.flush().unwrap();
    assert_eq!(&sender.join().unwrap(), b"ok");
}

#[tokio::test]
async fn a_closer_ends_a_blocked_read() {
    let (server, client) = pair(&Net::insecure(false), &Net::insecure(false), node("a")).await;
    let mut blocked = server.unwrap().into_blocking().unwrap();
    let closer = blocked.closer().unwrap();
    let reader = std::thread::spawn(move || blocked.read(&mut [0]).unwrap());
    closer.close();
    assert_eq!(reader.join().unwrap(), 0);
    drop(client);
}

#[tokio::test]
async fn strangers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let ours = Authority::new("c1").unwrap();
    let foreign = Authority::new("c1").unwrap();
    let a = net(&ours, dir.path(), node("a"));
    let stranger = net(&foreign, other.path(), node("b"));

    let (server, client) = pair(&a, &stranger, node("a")).await;
    assert!(
        matches!(server, Err(NetError::Handshake { .. })),
        "a certificate of another CA"
    );
    assert!(client.is_err());

    let (_, client) = pair(&a, &net(&ours, dir.path(), node("b")), node("c")).await;
    assert!(
        matches!(client, Err(NetError::Handshake { .. })),
        "another node than the expected one"
    );

    let (server, _) = pair(&a, &Net::insecure(false), node("a")).await;
    assert!(server.is_err(), "no TLS at all");
}

#[tokio::test]
async fn without_tls_only_loopback() {
    let refused = Net::insecure(false).listen("0.0.0.0:0".parse().unwrap());
    assert!(matches!(refused, Err(NetError::Insecure(_))));
    assert!(Net::insecure(true).listen("0.0.0.0:0".parse().unwrap()).is_ok());
}

#[test]
fn bad_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = Authority::new("c1")
        .unwrap()
        .write(dir.path(), Role::Coordinator)
        .unwrap();
    let missing = dir.path().join("none.pem");
    for (ca, cert, key) in [
        (&missing, &files.cert, &files.key),
        (&files.ca, &missing, &files.key),
        (&files.ca, &files.cert, &missing),
        (&files.key, &files.cert, &files.key),
    ] {
        assert!(matches!(Net::tls(ca, cert, key), Err(NetError::File { .. })));
    }
}

#[tokio::test]
async fn a_connection_has_the_congestion_control_that_it_asks_for() {
    // Reno is in every kernel.
    assert!(stage_net::may_have_congestion_control("reno"));
    assert!(!stage_net::may_have_congestion_control("nonesuch"));
    let (server, client) = pair(&Net::insecure(false), &Net::insecure(false), node("a")).await;
    let (server, client) = (server.unwrap(), client.unwrap());
    client.set_congestion_control("reno").unwrap();
    let error = client.set_congestion_control("nonesuch").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    let reno = client.into_blocking().unwrap();
    let has = rustix::net::sockopt::tcp_congestion(reno.plain_socket().unwrap()).unwrap();
    assert_eq!(has.trim_end_matches('\0'), "reno");
    drop(server);
}
