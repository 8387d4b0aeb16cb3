//! What survives the coordinator: SQLite behind a trait whose only write is one atomic batch.
//!
//! The writer has a thread of its own. The driver gathers what many commands change into one batch, so that one fsync
//! serves them all.

use prost::Message as _;
use rusqlite::{Connection, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use stage_core::bench::{Measurement, Subject};
use stage_core::id::{ClusterId, Epoch, JobId, NodeName};
use stage_core::job::{Changes, Record, Spec, TargetRecord};
use stage_core::learn::{Lesson, Past};
use stage_core::plan::Plan;
use stage_proto::v1;
use tokio::sync::{mpsc, oneshot};

use crate::measurements::{PUSHES, READINGS};

/// The layout of tables and blobs. A database of another one is refused until a migration exists.
const SCHEMA: i64 = 8;
/// "stge": tells our databases from others.
pub(crate) const APPLICATION: i64 = 0x7374_6765;

/// One thing to write.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// A new job's request.
    Spec(Box<Spec>),
    /// What of a job changed.
    Job(JobId, Box<Changes>),
    /// A job that need not be remembered any more.
    Forget(JobId),
    /// Something was measured.
    Measured(Box<Measurement>),
    /// A finished push has taught something.
    Learned(Box<Lesson>),
    /// A push is over, with its forecast and what became of it.
    Passed(Box<Past>),
    /// A node was declared away, or not any more.
    Drained(NodeName, bool),
}

/// What was read back of a job.
#[derive(Debug)]
pub(crate) struct StoredJob {
    pub(crate) spec: Spec,
    pub(crate) record: Record,
    pub(crate) plan: Option<Plan>,
    pub(crate) targets: Vec<TargetRecord>,
}

/// All that was read back.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    /// In the order of their submits.
    pub(crate) jobs: Vec<StoredJob>,
    pub(crate) drained: Vec<NodeName>,
    /// Oldest first.
    pub(crate) readings: Vec<Measurement>,
    pub(crate) lessons: Vec<Lesson>,
    /// Oldest first.
    pub(crate) pushes: Vec<Past>,
}

/// The coordinator's memory.
pub(crate) trait Store: Send {
    /// Writes all of it or nothing; on disk when this returns.
    fn commit(&mut self, batch: &[Change]) -> rusqlite::Result<()>;
}

/// [`Store`] in a SQLite database.
pub(crate) struct Sqlite {
    db: Connection,
}

fn blob<T: Serialize>(value: &T) -> rusqlite::Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

fn unblob<T: DeserializeOwned>(bytes: &[u8]) -> rusqlite::Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Blob, Box::new(error))
    })
}

impl Sqlite {
    /// Sets up a connection: durable at every commit.
    pub(crate) fn tune(db: Connection) -> rusqlite::Result<Self> {
        db.busy_timeout(std::time::Duration::from_secs(5))?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        db.pragma_update(None, "synchronous", "FULL")?;
        db.pragma_update(None, "foreign_keys", true)?;
        Ok(Self { db })
    }

    /// Makes the tables of a new cluster.
    pub(crate) fn create(&mut self, cluster: ClusterId) -> rusqlite::Result<()> {
        let tx = self.db.transaction()?;
        tx.execute_batch(
            "CREATE TABLE meta (key TEXT PRIMARY KEY, value ANY NOT NULL) STRICT;
             CREATE TABLE job (
                 id TEXT PRIMARY KEY, submitted_unix_ms INTEGER NOT NULL DEFAULT 0, phase TEXT NOT NULL DEFAULT 'queued',
                 name TEXT NOT NULL, source TEXT NOT NULL,
                 spec BLOB NOT NULL, record BLOB, plan BLOB) STRICT;
             CREATE TABLE job_node (
                 job TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE, place INTEGER NOT NULL,
                 node TEXT NOT NULL, state TEXT NOT NULL, record BLOB NOT NULL,
                 PRIMARY KEY (job, place)) STRICT, WITHOUT ROWID;
             CREATE TABLE drained (node TEXT PRIMARY KEY) STRICT;
             CREATE TABLE reading (
                 subject TEXT NOT NULL, unix_ms INTEGER NOT NULL, reading BLOB NOT NULL,
                 PRIMARY KEY (subject, unix_ms)) STRICT, WITHOUT ROWID;
             CREATE TABLE lesson (subject BLOB PRIMARY KEY, lesson BLOB NOT NULL) STRICT, WITHOUT ROWID;
             CREATE TABLE push (job TEXT PRIMARY KEY, unix_ms INTEGER NOT NULL, push BLOB NOT NULL) STRICT;",
        )?;
        tx.execute(
            "INSERT INTO meta VALUES ('schema', ?1), ('cluster_id', ?2), ('epoch', 0)",
            params![SCHEMA, cluster.to_string()],
        )?;
        tx.pragma_update(None, "application_id", APPLICATION)?;
        tx.commit()
    }

    /// What is wrong with the database, if anything.
    pub(crate) fn check(&self) -> rusqlite::Result<Option<String>> {
        let application: i64 = self
            .db
            .pragma_query_value(None, "application_id", |row| row.get(0))?;
        if application != APPLICATION {
            return Ok(Some("the database is not one of stage's".to_owned()));
        }
        let quick: String = self.db.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if quick != "ok" {
            return Ok(Some(format!("the database is damaged: {quick}")));
        }
        let schema: i64 = self.meta("schema")?;
        Ok((schema != SCHEMA)
            .then(|| format!("the database has layout {schema}, this release of stage knows {SCHEMA}")))
    }

    fn meta<T: rusqlite::types::FromSql>(&self, key: &str) -> rusqlite::Result<T> {
        self.db
            .query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0))
    }

    /// Whose database it is.
    pub(crate) fn cluster(&self) -> rusqlite::Result<Option<ClusterId>> {
        Ok(self.meta::<String>("cluster_id")?.parse().ok())
    }

    /// Commits the next epoch.
    pub(crate) fn next_epoch(&mut self) -> rusqlite::Result<Epoch> {
        self.db
            .execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'", [])?;
        let epoch: i64 = self.meta("epoch")?;
        Ok(Epoch(epoch.unsigned_abs()))
    }

    /// Reads everything back.
    pub(crate) fn load(&self) -> rusqlite::Result<Stored> {
        let mut stored = Stored::default();
        let mut jobs = self.db.prepare(
            "SELECT id, spec, record, plan FROM job WHERE record IS NOT NULL ORDER BY submitted_unix_ms, id",
        )?;
        let mut nodes = self
            .db
            .prepare("SELECT place, record FROM job_node WHERE job = ?1")?;
        let mut rows = jobs.query([])?;
        while let Some(row) = rows.next()? {
            let id: String = row.get(0)?;
            let spec: Spec = unblob(&row.get::<_, Vec<u8>>(1)?)?;
            let record = unblob(&row.get::<_, Vec<u8>>(2)?)?;
            let plan = row
                .get::<_, Option<Vec<u8>>>(3)?
                .map(|bytes| unblob(&bytes))
                .transpose()?;
            let mut targets = vec![TargetRecord::default(); spec.targets.len()];
            let mut places = nodes.query([&id])?;
            while let Some(row) = places.next()? {
                let place: usize = row
                    .get::<_, i64>(0)?
                    .unsigned_abs()
                    .try_into()
                    .unwrap_or(usize::MAX);
                if let Some(target) = targets.get_mut(place) {
                    *target = unblob(&row.get::<_, Vec<u8>>(1)?)?;
                }
            }
            stored.jobs.push(StoredJob {
                spec,
                record,
                plan,
                targets,
            });
        }
        let mut drained = self.db.prepare("SELECT node FROM drained")?;
        for node in drained.query_map([], |row| row.get::<_, String>(0))? {
            stored.drained.extend(node?.parse().ok());
        }
        let mut readings = self.db.prepare("SELECT reading FROM reading ORDER BY unix_ms")?;
        for reading in readings.query_map([], |row| row.get::<_, Vec<u8>>(0))? {
            // One that means nothing any more is only a measurement: it can be made again.
            let wire = v1::Measured::decode(reading?.as_slice()).ok();
            stored
                .readings
                .extend(wire.and_then(|wire| Measurement::try_from(&wire).ok()));
        }
        let mut lessons = self.db.prepare("SELECT lesson FROM lesson")?;
        for lesson in lessons.query_map([], |row| row.get::<_, Vec<u8>>(0))? {
            stored.lessons.push(unblob(&lesson?)?);
        }
        let mut pushes = self.db.prepare("SELECT push FROM push ORDER BY unix_ms")?;
        for push in pushes.query_map([], |row| row.get::<_, Vec<u8>>(0))? {
            stored.pushes.push(unblob(&push?)?);
        }
        Ok(stored)
    }
}

impl Store for Sqlite {
    fn commit(&mut self, batch: &[Change]) -> rusqlite::Result<()> {
        let tx = self.db.transaction()?;
        for change in batch {
            match change {
                Change::Spec(spec) => {
                    tx.prepare_cached(
                        "INSERT INTO job (id, name, source, spec) VALUES (?1, ?2, ?3, ?4)
                         ON CONFLICT (id) DO UPDATE SET source = excluded.source, spec = excluded.spec",
                    )?
                    .execute(params![
                        spec.id.to_string(),
                        spec.name(),
                        spec.source.as_str(),
                        blob(spec)?
                    ])?;
                }
                Change::Job(id, changes) => write_job(&tx, *id, changes)?,
                Change::Forget(id) => {
                    tx.execute("DELETE FROM job WHERE id = ?1", [id.to_string()])?;
                }
                Change::Measured(measurement) => write_reading(&tx, measurement)?,
                Change::Learned(lesson) => {
                    tx.prepare_cached("INSERT OR REPLACE INTO lesson VALUES (?1, ?2)")?
                        .execute(params![blob(&lesson.subject)?, blob(lesson)?])?;
                }
                Change::Passed(past) => write_past(&tx, past)?,
                Change::Drained(node, true) => {
                    tx.execute("INSERT OR IGNORE INTO drained VALUES (?1)", [node.as_str()])?;
                }
                Change::Drained(node, false) => {
                    tx.execute("DELETE FROM drained WHERE node = ?1", [node.as_str()])?;
                }
            }
        }
        tx.commit()
    }
}

/// Keeps the newest of each subject.
fn write_reading(tx: &Transaction<'_>, measurement: &Measurement) -> rusqlite::Result<()> {
    let subject = match &measurement.subject {
        Subject::Node(node) => format!("node {node}"),
        Subject::Link(pair) => format!("link {} {}", pair.from, pair.to),
    };
    let at = measurement.unix_ms.cast_signed();
    let reading = v1::Measured::from(measurement).encode_to_vec();
    tx.prepare_cached("INSERT OR REPLACE INTO reading VALUES (?1, ?2, ?3)")?
        .execute(params![subject, at, reading])?;
    tx.prepare_cached(
        "DELETE FROM reading WHERE subject = ?1 AND unix_ms NOT IN
             (SELECT unix_ms FROM reading WHERE subject = ?1 ORDER BY unix_ms DESC LIMIT ?2)",
    )?
    .execute(params![subject, i64::from(READINGS)])?;
    Ok(())
}

/// Keeps the newest.
fn write_past(tx: &Transaction<'_>, past: &Past) -> rusqlite::Result<()> {
    tx.prepare_cached("INSERT OR REPLACE INTO push VALUES (?1, ?2, ?3)")?
        .execute(params![
            past.job.to_string(),
            past.unix_ms.cast_signed(),
            blob(past)?
        ])?;
    tx.prepare_cached(
        "DELETE FROM push WHERE job NOT IN (SELECT job FROM push ORDER BY unix_ms DESC LIMIT ?1)",
    )?
    .execute(params![i64::from(PUSHES)])?;
    Ok(())
}

fn write_job(tx: &Transaction<'_>, id: JobId, changes: &Changes) -> rusqlite::Result<()> {
    let key = id.to_string();
    if let Some(record) = &changes.record {
        tx.prepare_cached("UPDATE job SET record = ?2, phase = ?3, submitted_unix_ms = ?4 WHERE id = ?1")?
            .execute(params![
                key,
                blob(record)?,
                record.phase.as_str(),
                record.submitted_unix_ms.cast_signed()
            ])?;
    }
    if let Some(plan) = &changes.plan {
        tx.prepare_cached("UPDATE job SET plan = ?2 WHERE id = ?1")?
            .execute(params![key, blob(plan)?])?;
    }
    let mut write = tx.prepare_cached("INSERT OR REPLACE INTO job_node VALUES (?1, ?2, ?3, ?4, ?5)")?;
    for (at, node, target) in &changes.targets {
        write.execute(params![
            key,
            i64::try_from(*at).unwrap_or(i64::MAX),
            node.as_str(),
            target.state.as_str(),
            blob(target)?
        ])?;
    }
    Ok(())
}

struct Work {
    batch: Vec<Change>,
    done: oneshot::Sender<rusqlite::Result<()>>,
}

/// The thread that writes. It ends when this is dropped.
pub(crate) struct Writer {
    work: Option<mpsc::Sender<Work>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread.
    pub(crate) fn start(mut store: impl Store + 'static) -> std::io::Result<Self> {
        let (work, mut inbox) = mpsc::channel::<Work>(1);
        let thread = std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || {
                while let Some(Work { batch, done }) = inbox.blocking_recv() {
                    // Who asked may be gone; the write counts all the same.
                    drop(done.send(store.commit(&batch)));
                }
            })?;
        Ok(Self {
            work: Some(work),
            thread: Some(thread),
        })
    }

    /// Commits the batch; on disk when this returns.
    pub(crate) async fn commit(&self, batch: Vec<Change>) -> rusqlite::Result<()> {
        let gone = || rusqlite::Error::UnwindingPanic;
        let (done, answer) = oneshot::channel();
        let work = self.work.as_ref().ok_or_else(gone)?;
        work.send(Work { batch, done }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by the commit that met it.
            drop(thread.join());
        }
    }
}
