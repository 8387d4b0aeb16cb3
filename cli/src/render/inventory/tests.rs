use stage_core::ask::Kind;
use stage_core::id::JobId;

use super::*;

fn copy() -> Copy {
    Copy {
        path: "/scratch/stage/genome.db".to_owned(),
        place: "scratch:genome.db".to_owned(),
        kind: Kind::File,
        unpacked: false,
        sha256: Some(FileDigest([0x5a; 32])),
        root: RootDigest([0xc3; 32]),
        content: RootDigest([0xc3; 32]),
        bytes: ByteCount(5 << 30),
        published: 1_700_000_000,
        job: JobId::from_bytes([0x11; 16]),
        found: false,
        state: State::Ok,
        detail: String::new(),
    }
}

fn on(node: &str, change: impl FnOnce(&mut Copy)) -> (NodeName, Copy) {
    let mut copy = copy();
    change(&mut copy);
    (node.parse().unwrap(), copy)
}

#[test]
fn equal_copies_are_one_line() {
    let all = [
        on("n3", |copy| copy.published += 3),
        on("n1", |_| ()),
        on("n2", |copy| copy.published += 1),
        on("n5", |copy| copy.found = true),
        on("n4", |copy| {
            copy.state = State::Damaged;
            copy.detail = "chunk 3 of 5120 differs".to_owned();
        }),
        on("n1", |copy| {
            copy.path = "/scratch/stage/a.db".to_owned();
            copy.sha256 = None;
            copy.state = State::Missing;
        }),
    ];
    let mut out = Vec::new();
    let now = UNIX_EPOCH + Duration::from_secs(1_700_000_200);
    copies(&mut out, &all, now).unwrap();
    insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
    nodes   path                      digest                 size         age  state
    n1      /scratch/stage/a.db       root c3c3c3c3c3c3  5.00 GiB  3 min 20 s  missing
    n[1-3]  /scratch/stage/genome.db  5a5a5a5a5a5a       5.00 GiB  3 min 20 s  ok
    n5      /scratch/stage/genome.db  5a5a5a5a5a5a       5.00 GiB  3 min 20 s  ok (stood there before)
    n4      /scratch/stage/genome.db  5a5a5a5a5a5a       5.00 GiB  3 min 20 s  damaged: chunk 3 of 5120 differs
    ");
}

// R99.
#[test]
fn a_name_with_several_contents_is_mixed() {
    let mut contents = Contents::default();
    for (node, copy) in [
        on("n1", |_| ()),
        on("n2", |copy| copy.state = State::Changed),
        on("n3", |copy| {
            copy.content = RootDigest([0xab; 32]);
            copy.sha256 = None;
        }),
        on("n4", |copy| {
            copy.content = RootDigest([0xcd; 32]);
            copy.state = State::Missing;
        }),
        // The same that came as a tar is the same.
        on("n5", |copy| {
            copy.unpacked = true;
            copy.root = RootDigest([0xef; 32]);
        }),
        // The same name elsewhere is another.
        on("n1", |copy| {
            copy.content = RootDigest([0xcd; 32]);
            copy.place = "scratch:old/genome.db".to_owned();
        }),
    ] {
        contents.add(&node, &copy);
    }
    let mut out = Vec::new();
    contents.show_mixed(&mut out).unwrap();
    insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"mixed: scratch:genome.db is not the same everywhere: root abababababab on n3, 5a5a5a5a5a5a on n[1-2,5]");
    let mixed: Vec<_> = contents.mixed().map(|(place, of)| Mixed::of(place, of)).collect();
    let mixed = serde_json::to_value(&mixed).unwrap();
    assert_eq!(mixed[0]["place"], "scratch:genome.db");
    assert_eq!(
        mixed[0]["contents"][1]["nodes"],
        serde_json::json!(["n1", "n2", "n5"])
    );
    assert_eq!(mixed[0]["contents"].as_array().unwrap().len(), 2);
}

#[test]
fn a_copy_for_scripts() {
    let mut out = Vec::new();
    for (node, copy) in [
        on("n1", |_| ()),
        on("n2", |copy| {
            copy.sha256 = None;
            copy.state = State::Changed;
            copy.detail = "it was written to".to_owned();
            copy.found = true;
        }),
    ] {
        json::write(&mut out, &CopyLine::of(&node, &copy)).unwrap();
    }
    insta::assert_snapshot!(String::from_utf8(out).unwrap(), @r#"
    {"event":"copy","node":"n1","path":"/scratch/stage/genome.db","place":"scratch:genome.db","kind":"file","sha256":"5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a","root":"c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3","bytes":5368709120,"published":1700000000,"state":"ok","job":"11111111-1111-1111-1111-111111111111"}
    {"event":"copy","node":"n2","path":"/scratch/stage/genome.db","place":"scratch:genome.db","kind":"file","sha256":null,"root":"c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3","bytes":5368709120,"published":1700000000,"state":"changed","detail":"it was written to","found":true,"job":"11111111-1111-1111-1111-111111111111"}
    "#);
}

#[test]
fn nodes_with_one_reason_are_named_together() {
    let failed: Vec<(NodeName, Failure)> = ["n1", "n2", "n4"]
        .iter()
        .map(|node| {
            let node: NodeName = node.parse().unwrap();
            let failure = Failure::new(Code::Away, "the agent is away", "start it").on(&node);
            (node, failure)
        })
        .collect();
    let mut out = Vec::new();
    reasons(&mut out, &failed, "did not answer").unwrap();
    insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
    stage: n[1-2,4] did not answer: the agent is away
      next: start it
    ");
}
