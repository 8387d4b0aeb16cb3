//! `[groups]`: hostlists and commands.

use std::time::Duration;

use toml::de::DeValue;

use super::super::Group;
use super::super::report::{At, Report, Section, names};
use super::GroupDraft;
use crate::id::NodeName;

pub(super) fn groups(report: &mut Report<'_>, section: &Section<'_>) -> Vec<(At<String>, GroupDraft)> {
    let mut groups = Vec::new();
    for (key, value) in section.entries() {
        let at = value.span().start;
        if key.value == "all" {
            report.error(
                key.at,
                "group \"all\" is built in and names every node: use another name",
            );
            continue;
        }
        if key.value.parse::<NodeName>().is_err() {
            let message = format!(
                "{:?} is not a group name: use 1 to 63 letters, digits, '-', '_' or '.', beginning with a letter or \
                 digit",
                key.value
            );
            report.error(key.at, message);
            continue;
        }
        let group = match value.get_ref() {
            DeValue::String(text) => names(
                report,
                &At {
                    value: text.as_ref(),
                    at,
                },
            )
            .map(|value| GroupDraft::Static(At { value, at })),
            DeValue::Table(table) => command(report, &Section::new(table, at, "the group")),
            other => {
                let message = format!(
                    "group {} is {}: write a hostlist such as \"n[1-4]\", or {{ command = [\"program\", \
                     \"argument\"], every = \"60 s\" }}",
                    key.value,
                    other.type_str()
                );
                report.error(at, message);
                None
            }
        };
        if let Some(group) = group {
            groups.push((
                At {
                    value: key.value.to_owned(),
                    at: key.at,
                },
                group,
            ));
        }
    }
    groups
}

fn command(report: &mut Report<'_>, section: &Section<'_>) -> Option<GroupDraft> {
    section.check_keys(report, &["command", "every"]);
    const EXAMPLE: &str = "write command = [\"sinfo\", \"-h\", \"-o\", \"%N\"]";
    let words = section.get("command");
    let command = words
        .and_then(|words| words.get_ref().as_array())
        .and_then(|words| {
            words
                .iter()
                .map(|word| word.get_ref().as_str().map(str::to_owned))
                .collect::<Option<Vec<_>>>()
        })
        .filter(|words| words.first().is_some_and(|program| !program.is_empty()));
    if command.is_none() {
        let at = words.map_or(section.at, |words| words.span().start);
        report.error(
            at,
            format!("the group's command is not a list of strings (no shell is used): {EXAMPLE}"),
        );
    }
    section.need_text(report, "every", "60 s")?;
    let every = section.time(report, "every", "60 s")?;
    if every.value < Duration::from_secs(1) {
        report.error(
            every.at,
            "every is under a second: write for example every = \"60 s\"",
        );
    }
    Some(GroupDraft::Command(Group::Command {
        command: command?,
        every: every.value,
    }))
}
