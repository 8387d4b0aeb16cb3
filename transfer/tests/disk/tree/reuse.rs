//! What the generation before shares with the next one: nothing that is there already is moved or stored again.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use stage_core::assignment::IfExists;
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::failure::Code;

use super::bench::{Bench, Node, Tree, What};
use crate::bench::content;

fn inodes(bench: &Bench, names: &[&str]) -> Vec<u64> {
    names
        .iter()
        .map(|name| fs::metadata(bench.name().join(name)).unwrap().ino())
        .collect()
}

/// Ten volumes of two chunks and a bit each.
fn volumes() -> Tree {
    let mut tree = Tree::default();
    tree.dir("refdb", 0o755);
    for i in 0..10 {
        tree.file(
            format!("refdb/vol{i}").as_bytes(),
            0o644,
            content(2 * CHUNK + 5000 + i),
        );
    }
    tree
}

#[test]
fn of_one_changed_file_only_what_changed_comes() {
    let mut bench = Bench::new(volumes());
    bench.push();
    let names: Vec<_> = (0..10).map(|i| format!("vol{i}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let before = inodes(&bench, &names);
    bench.tree.bytes("refdb/vol4")[CHUNK as usize + 17] ^= 1;
    assert_eq!(bench.next(IfExists::Fail).refused().code, Code::Exists);
    let (wanted, already) = bench.next(IfExists::Replace).push();
    // Bodies come first: two chunks for each volume.
    assert_eq!((wanted, already), (vec![9], false));
    let after = inodes(&bench, &names);
    for (name, (old, new)) in names.iter().zip(before.iter().zip(&after)) {
        assert_eq!(old == new, *name != "vol4", "{name}");
    }
    let generations = bench.generations();
    assert_eq!(generations.len(), 2, "{generations:?}");
    // The old one still is what it was.
    let mut old = volumes();
    std::mem::swap(&mut old, &mut bench.tree);
    let link = fs::read_link(bench.name()).unwrap();
    let kept = generations.iter().find(|g| !link.ends_with(g.as_str())).unwrap();
    assert_eq!(
        bench
            .tree
            .differences("refdb", &bench.dir().join(".stage").join(kept)),
        {
            // Its unchanged files have a second name now, in the new generation, which is not counted.
            [""; 0]
        }
    );
}

#[test]
fn a_file_that_grows_by_a_byte_moves_only_its_own_tail() {
    let mut bench = Bench::new(volumes());
    bench.push();
    bench.tree.bytes("refdb/vol5").push(7);
    let (wanted, already) = bench.next(IfExists::Replace).push();
    assert!(!already);
    // The tails of all files lie in one pack at the end, here of one chunk.
    assert_eq!(wanted, [20]);
    // A small one in the middle of many: the pack after it is cut anew, but all of it is in old files.
    let mut bench = Bench::new(Tree::wide());
    bench.push();
    bench
        .tree
        .bytes("refdb/a file with a long name, as many have one 0200")
        .push(1);
    let (wanted, _) = bench.next(IfExists::Replace).push();
    assert_eq!(wanted.len(), 1, "{wanted:?}");
}

#[test]
fn whatever_differs_is_seen_and_made_right() {
    type Change = (&'static str, fn(&mut Tree), usize);
    let changes: [Change; 12] = [
        (
            "an extra file",
            |tree| {
                tree.file(b"refdb/zz", 0o644, b"new".to_vec());
            },
            1,
        ),
        (
            "an extra empty file",
            |tree| {
                tree.file(b"refdb/zz", 0o644, vec![]);
            },
            0,
        ),
        (
            "an extra directory",
            |tree| {
                tree.dir("refdb/zz", 0o755);
            },
            0,
        ),
        (
            "a missing file",
            |tree| drop(tree.0.remove(b"refdb/-rf".as_slice())),
            1,
        ),
        (
            "a missing directory",
            |tree| drop(tree.0.remove(b"refdb/nothing".as_slice())),
            0,
        ),
        (
            "a renamed file",
            |tree| {
                let file = tree.0.remove(b"refdb/big".as_slice()).unwrap();
                tree.0.insert(b"refdb/bigger".to_vec(), file);
            },
            3,
        ),
        (
            "a mode",
            |tree| tree.0.get_mut(b"refdb/big".as_slice()).unwrap().mode = 0o444,
            0,
        ),
        (
            "a directory's mode",
            |tree| tree.0.get_mut(b"refdb/sub".as_slice()).unwrap().mode = 0o700,
            0,
        ),
        (
            "a time",
            |tree| tree.0.get_mut(b"refdb/sub/deep/more".as_slice()).unwrap().mtime.1 ^= 1,
            0,
        ),
        (
            "a directory's time",
            |tree| tree.0.get_mut(b"refdb".as_slice()).unwrap().mtime.0 += 1,
            0,
        ),
        (
            "a symbolic link",
            |tree| {
                tree.symlink("refdb/up", "../refdb/big");
            },
            0,
        ),
        (
            "a link that is a file of its own",
            |tree| {
                let bytes = content(10);
                let node = &tree.0[b"refdb/aa".as_slice()];
                let own = Node {
                    what: What::File { bytes, runs: None },
                    ..node.clone()
                };
                tree.0.insert(b"refdb/sub/other name".to_vec(), own);
            },
            1,
        ),
    ];
    for (what, change, most) in changes {
        let mut bench = Bench::new(Tree::rich());
        bench.push();
        change(&mut bench.tree);
        assert_eq!(bench.next(IfExists::Fail).refused().code, Code::Exists, "{what}");
        let (wanted, already) = bench.next(IfExists::Replace).push();
        assert!(!already, "{what}");
        assert!(wanted.len() <= most, "{what}: {wanted:?} had to come");
        assert_eq!(bench.generations().len(), 2, "{what}");
        assert_eq!(bench.next(IfExists::Fail).push(), (vec![], true), "{what}");
    }
}

#[test]
fn a_file_that_somebody_changed_in_the_copy_is_put_right() {
    let mut bench = Bench::new(volumes());
    bench.push();
    let time = fs::metadata(bench.name().join("vol3"))
        .unwrap()
        .modified()
        .unwrap();
    // Size and time do not tell.
    let file = fs::OpenOptions::new()
        .write(true)
        .open(bench.name().join("vol3"))
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"damage", 99).unwrap();
    file.set_modified(time).unwrap();
    assert_eq!(bench.next(IfExists::Fail).refused().code, Code::Exists);
    assert_eq!(bench.next(IfExists::Replace).push(), (vec![6], false));
}

#[test]
fn a_twin_that_changes_while_it_is_compared_is_not_published() {
    let mut bench = Bench::new(volumes());
    bench.push();
    bench.tree.bytes("refdb/vol4")[0] ^= 1;
    let target = bench.next(IfExists::Replace).ready();
    assert_eq!(bench.receive(&target), [8]);
    let vol7 = bench.name().join("vol7");
    let mut bytes = fs::read(&vol7).unwrap();
    bytes[1] ^= 1;
    fs::write(&vol7, bytes).unwrap();
    target.publish(&bench.fin()).unwrap_err();
    drop(target);
    // Asked again, the file comes over the network.
    assert_eq!(bench.push().0, [14]);
}

#[test]
fn a_twin_that_was_only_touched_is_as_good_as_before() {
    let mut bench = Bench::new(volumes());
    bench.push();
    let touch = |bench: &Bench| {
        let vol7 = bench.name().join("vol7");
        // Another name comes and goes: its change time tells, its content is the same.
        fs::hard_link(&vol7, bench.root.join("aside")).unwrap();
        fs::remove_file(bench.root.join("aside")).unwrap();
    };
    let target = bench.next(IfExists::Replace).ready();
    assert_eq!(bench.receive(&target), [0; 0]);
    touch(&bench);
    assert!(target.publish(&bench.fin()).unwrap().already);
    target.release();
    bench.tree.bytes("refdb/vol4")[0] ^= 1;
    let target = bench.next(IfExists::Replace).ready();
    assert_eq!(bench.receive(&target), [8]);
    touch(&bench);
    assert!(!target.publish(&bench.fin()).unwrap().already);
    target.release();
    bench.assert_published();
}

#[test]
fn what_was_shared_and_not_published_is_never_written_to() {
    let mut bench = Bench::new(volumes());
    bench.push();
    let vol7 = bench.name().join("vol7");
    let before = fs::read(&vol7).unwrap();
    bench.tree.bytes("refdb/vol4")[0] ^= 1;
    let target = bench.next(IfExists::Replace).ready();
    bench.receive(&target);
    drop(target);
    // As an agent leaves it that dies after it linked what is the same, before the switch; and one chunk is doubted.
    fs::hard_link(&vol7, bench.partial(0).join("vol7")).unwrap();
    let table = bench.state.join("jobs").join(bench.job.to_string()).join("table");
    let table = fs::OpenOptions::new().write(true).open(table).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&table, &[0; 36], (8 << 10) + 36 * 14).unwrap();
    let target = bench.ready();
    assert!(!target.store().has(ChunkIndex(14)));
    let claim = target.store().claim(ChunkIndex(14)).unwrap();
    claim.write(0, &[9; 1000]).unwrap();
    drop(claim);
    assert!(
        fs::read(&vol7).unwrap() == before,
        "the generation before was written to"
    );
    bench.receive(&target);
    target.publish(&bench.fin()).unwrap();
    target.release();
    bench.assert_published();
}
