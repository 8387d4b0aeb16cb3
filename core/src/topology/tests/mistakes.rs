//! What is wrong with a text, line by line.

use super::*;

/// The errors of a text as "line: message".
fn errors(text: &str) -> String {
    let errors = Topology::parse("t.toml", text).expect_err("the text is wrong");
    assert!(errors.is_sorted_by_key(|error| error.line), "{}", listed(&errors));
    errors
        .iter()
        .map(|error| format!("{}: {}", error.line, error.message))
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn every_mistake_is_named_with_its_line() {
    for (more, expected) in [
        (
            "nicc = \"1 Gbit/s\"",
            "15: unknown key \"nicc\" in [[node]], did you mean \"nic\"? (known: name, ",
        ),
        (
            "[[swich]]\nname = \"x\"",
            "15: unknown key \"swich\" in the file, did you mean \"switch\"?",
        ),
        ("[switch]\nname = \"x\"", "15: not TOML at \"switch]\": "),
        (
            "disk_write = 12",
            "15: disk_write is integer, not a string: write disk_write = \"1.2 GB/s\"",
        ),
        (
            "disk_write = \"12\"",
            "15: disk_write: \"12\" has no unit: write for example \"10 Gbit/s\"",
        ),
        ("disk_write = \"0 GB/s\"", "15: disk_write is zero"),
        ("disk_write = \"1 s\"", "15: disk_write: \"s\" is not a unit here"),
        (
            "nic = \"1 Gbit/s\"",
            "15: not TOML at \"nic = \\\"1 Gbit/s\\\"\": duplicate key",
        ),
        ("a = [", "not TOML"),
        ("[[switch]]", "15: [[switch]] has no name: add name = \"rack1\""),
        (
            "[[switch]]\nname = \"a b\"\n[[switch]]\nname = \"ä\"",
            "18: \"ä\" is not a switch name",
        ),
        ("[[switch]]\nname = \"\"", "16: an empty string names nothing"),
        (
            "[[switch]]\nname = \"r[2-1]\"",
            "16: \"r[2-1]\" is not a hostlist: \"2-1\" runs backwards: write 1-2",
        ),
        (
            "[[switch]]\nname = \"rack[2-3]\"",
            "16: \"rack2\" is there already, on line 6",
        ),
        (
            "[[switch]]\nname = \"n[1-4]\"",
            "16: \"n1\" (and 3 more) is there already, on line 11",
        ),
        (
            "[[node]]\nname = \"x\"",
            "16: x cannot be reached from the other nodes: add attach and nic",
        ),
        (
            "[[node]]\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "15: [[node]] has no name: add name = \"n1\"",
        ),
        (
            "[[node]]\nname = \"x\"\nattach = \"core\"",
            "15: the interface has no rate: add nic = \"10 Gbit/s\"",
        ),
        (
            "[[node]]\nname = \"x\"\nnic = \"1 Gbit/s\"",
            "15: [[node]] has no attach: add attach = \"rack1\"",
        ),
        (
            "[[node]]\nname = \"x\"\nattach = \"rack3\"\nnic = \"1 Gbit/s\"",
            "17: unknown switch \"rack3\", did you mean \"rack1\"?",
        ),
        (
            "[[node]]\nname = \"x\"\nattach = \"n1\"\nnic = \"1 Gbit/s\"",
            "17: \"n1\" is a node: attach names a switch",
        ),
        (
            "[[node]]\nname = \"x\"\nattach = \"rack[1-2]\"\nnic = \"1 Gbit/s\"",
            "17: attach names one switch, not \"rack[1-2]\"",
        ),
        (
            "[[node]]\nname = \"x\"\naddress = \"10.0.0.256\"\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "17: \"10.0.0.256\" is not an IP address",
        ),
        (
            "[[node]]\nname = \"x\"\naddress = \"0.0.0.0\"\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "17: 0.0.0.0 is no machine's address",
        ),
        (
            "[[node]]\nname = \"x\"\naddress = \"10.0.1.4\"\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "17: address 10.0.1.4 is there already, on line 12",
        ),
        (
            "[[node]]\nname = \"x[1-3]\"\naddress = \"10.1.0.[1-2]\"\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "17: 2 addresses for 3 names: they go in step, so write a hostlist of 3",
        ),
        (
            "[[node]]\nname = \"x\"\nattach = \"core\"\n[[node.interface]]\nname = \"e\"\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "17: a node with [[node.interface]] has no attach of its own",
        ),
        (
            "[[node]]\nname = \"x\"\n[[node.interface]]\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "17: [[node.interface]] has no name",
        ),
        (
            "[[node]]\nname = \"x\"\n[[node.interface]]\nname = \"e\"\nattach = \"core\"\nnic = \"1 Gbit/s\"\nmtu = 9000\n",
            "21: unknown key \"mtu\"",
        ),
        (
            "[[node]]\nname = \"x\"\n[[node.interface]]\nname = \"e\"\nattach = \"core\"\nnic = \"1 Gbit/s\"\n[[node.interface]]\nname = \"e\"\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "21: the node has two interfaces \"e\"",
        ),
        ("[[node]]\nname = \"x\"\ninterface = []", "15: interface is empty"),
        (
            "[[node]]\nname = \"x\"\n[[node.interface]]\nname = \"a/b\"\nattach = \"core\"\nnic = \"1 Gbit/s\"",
            "18: \"a/b\" is not an interface",
        ),
        (
            "roots.data = \"/x\"",
            "15: unknown root \"data\" (a root stands in [roots] first)",
        ),
        (
            "[roots]\nmain = \"scratch\"",
            "16: root main is not an absolute path: write main = \"/scratch/stage\"",
        ),
        (
            "[roots]\nmain = \"/a/../b\"",
            "16: root main is not an absolute path",
        ),
        (
            "[[switch]]\nname = \"island\"\n[[node]]\nname = \"x[1-2]\"\nattach = \"island\"\nnic = \"1 Gbit/s\"",
            "18: x[1-2] cannot be reached from the other nodes: add a [[link]] that joins switch \"island\"",
        ),
        (
            "[[link]]\ncapacity = \"1 Gbit/s\"",
            "15: the link does not say what it joins: write between = ",
        ),
        (
            "[[link]]\nbetween = [\"core\"]\ncapacity = \"1 Gbit/s\"",
            "16: between is not a list of two names",
        ),
        (
            "[[link]]\nbetween = \"core\"\ncapacity = \"1 Gbit/s\"",
            "16: between is not a list of two names",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rack1\"]",
            "15: the link has no capacity: add capacity = ",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rack1\"]\ncapacity = \"0 Gbit/s\"",
            "17: capacity is zero",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"core\"]\ncapacity = \"1 Gbit/s\"",
            "16: the link joins \"core\" with itself",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rock1\"]\ncapacity = \"1 Gbit/s\"",
            "16: unknown switch or node \"rock1\", did you mean \"rack1\"?",
        ),
        (
            "[[link]]\nbetween = [\"rack[1-2]\", \"n[1-3]\"]\ncapacity = \"1 Gbit/s\"",
            "16: 2 names on one side and 3 on the other",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rack1\"]\ncapacity = \"1 Gbit/s\"\nrtt = \"2\"",
            "18: rtt: \"2\" has no unit: write for example \"0.2 ms\"",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rack1\"]\ncapacity = \"1 Gbit/s\"\nloss = 1.5",
            "18: loss is a share of at least 0 and less than 1",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rack1\"]\ncapacity = \"1 Gbit/s\"\nloss = -0.1",
            "18: loss is a share",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rack1\"]\ncapacity = \"1 Gbit/s\"\nloss = nan",
            "18: loss is a share",
        ),
        (
            "[[link]]\nbetween = [\"core\", \"rack1\"]\ncapacity = \"1 Gbit/s\"\ncongestion_control = \"b r\"",
            "18: \"b r\" is no congestion control",
        ),
        ("[groups]\nall = \"n1\"", "16: group \"all\" is built in"),
        ("[groups]\n\"a b\" = \"n1\"", "16: \"a b\" is not a group name"),
        (
            "[groups]\nn2 = \"n1\"",
            "16: group \"n2\" has the name of a node (line 11)",
        ),
        (
            "[groups]\ng = \"n[3-5]\"",
            "16: group \"g\" names an unknown node \"n5\", did you mean \"n1\"?",
        ),
        (
            "[groups]\ng = \"n[3-8]\"",
            "16: group \"g\" names 4 unknown nodes: n[5-8]",
        ),
        (
            "[groups]\ng = \"rack1\"",
            "16: group \"g\" names an unknown node \"rack1\"",
        ),
        ("[groups]\ng = 3", "16: group g is integer: write a hostlist"),
        (
            "[groups]\ng = { command = \"sinfo\", every = \"60 s\" }",
            "16: the group's command is not a list of strings",
        ),
        (
            "[groups]\ng = { command = [], every = \"60 s\" }",
            "16: the group's command is not a list of strings",
        ),
        (
            "[groups]\ng = { command = [\"sinfo\"] }",
            "16: the group has no every: add every = \"60 s\"",
        ),
        (
            "[groups]\ng = { command = [\"sinfo\"], every = \"1 ms\" }",
            "16: every is under a second",
        ),
        (
            "[groups]\ng = { comand = [\"sinfo\"], every = \"9 s\" }",
            "16: unknown key \"comand\" in the group, did you mean \"command\"?",
        ),
        (
            "[groups]\ng = { command = [\"sinfo\"], every = \"60\" }",
            "16: every: \"60\" has no unit",
        ),
    ] {
        let errors = errors(&format!("{BASE}{more}\n"));
        assert!(
            errors.contains(expected),
            "{more}\n--- wanted\n{expected}\n--- got\n{errors}"
        );
        // What follows from a mistake is no second mistake (beside the wrong key and the missing one).
        let lines = errors.lines().count();
        assert!(
            lines == 1
                || (lines == 2 && (more.contains("comand") || more.contains("a b")))
                || errors.contains("not TOML"),
            "{more}\n{errors}"
        );
    }
    assert!(errors("").starts_with("1: there is no [cluster]"));
    assert!(errors("").contains("1: there is no node"));
    assert!(errors("[cluster]\nnam = \"x\"\n").contains("1: [cluster] has no name"));
    assert!(errors("cluster = 3").contains("1: cluster is not a table: write [cluster]"));
    assert!(
        errors("node = [3]").contains("1: node is not a list of tables: write [[node]] on a line of its own")
    );
    assert!(errors("node = 3").contains("1: node is not a list of tables"));
}

#[test]
fn all_mistakes_are_told_at_once_in_line_order() {
    let text = BASE
        .replace("capacity = \"40 Gbit/s\"", "capacity = \"40\"")
        .replace("\"lab\"", "\"a/b\"")
        + "nicc = 3\n[groups]\ng = \"m[1-2]\"\n[roots]\nr = \"x\"\n";
    let errors = errors(&text);
    let lines: Vec<&str> = errors
        .lines()
        .map(|line| line.split(':').next().unwrap())
        .collect();
    assert_eq!(lines, ["2", "9", "15", "17", "19"], "{errors}");
}

#[test]
fn several_syntax_errors_are_told_each() {
    let errors = errors("[cluster]\nname = \nx = \"\n[[node]]\nname = 'a'\ny = = 3\n");
    let lines: Vec<&str> = errors
        .lines()
        .map(|line| line.split(':').next().unwrap())
        .collect();
    assert!(
        lines.contains(&"2") && lines.contains(&"3") && lines.contains(&"6"),
        "{errors}"
    );
}
