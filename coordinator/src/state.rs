//! The state directory: a lock, the cluster's id, and the database. Only an empty one is a first start; a damaged
//! or incomplete one is refused and never made anew, because agents would take a coordinator that forgot its jobs at
//! its word.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};
use stage_core::bench::Measurement;
use stage_core::id::{ClusterId, Epoch, NodeName};
use stage_core::learn::{Lesson, Past};

use crate::error::Error;
use crate::store::{Sqlite, StoredJob, Writer};

const LOCK: &str = "lock";
const CLUSTER_ID: &str = "cluster-id";
const DATABASE: &str = "stage.db";

/// A state directory in use.
pub(crate) struct Opened {
    pub(crate) cluster: ClusterId,
    pub(crate) epoch: Epoch,
    pub(crate) jobs: Vec<StoredJob>,
    pub(crate) drained: Vec<NodeName>,
    pub(crate) readings: Vec<Measurement>,
    pub(crate) lessons: Vec<Lesson>,
    pub(crate) pushes: Vec<Past>,
    pub(crate) writer: Writer,
    /// Held as long as the writer writes.
    pub(crate) lock: File,
}

fn refused(path: &Path, why: impl std::fmt::Display, hint: &'static str) -> Error {
    Error::State {
        path: path.to_owned(),
        why: why.to_string(),
        hint,
    }
}

const RIGHTS: &str = "give the coordinator's user the right to it, or name another with --state";
const RESTORE: &str = "restore a backup of the whole directory; start with an empty one only if all jobs may be forgotten, \
                       and then remove the agents' state too";

/// Opens a state directory, makes it if absent, and commits the next epoch.
pub(crate) fn open(dir: &Path) -> Result<Opened, Error> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| refused(dir, error, RIGHTS))?;
    let lock_path = dir.join(LOCK);
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock_path)
        .map_err(|error| refused(&lock_path, error, RIGHTS))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        refused(
            dir,
            "another coordinator uses it",
            "stop that one, or name another directory with --state",
        )
    })?;
    let id_path = dir.join(CLUSTER_ID);
    let db_path = dir.join(DATABASE);
    let known = read_id(&id_path)?;
    let damaged =
        |error: rusqlite::Error| refused(&db_path, format!("the database is damaged: {error}"), RESTORE);
    let exists = db_path
        .try_exists()
        .map_err(|error| refused(&db_path, error, RIGHTS))?;
    let (mut store, cluster) = if exists {
        let db = Connection::open_with_flags(
            &db_path,
            OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
        )
        .map_err(damaged)?;
        // A file that is no database at all says so at the first question.
        let half_made = db
            .query_row("SELECT count(*) FROM sqlite_schema", [], |row| {
                row.get::<_, i64>(0)
            })
            .map_err(damaged)?
            == 0;
        let mut store = Sqlite::tune(db).map_err(damaged)?;
        if half_made && known.is_none() {
            // A first start that was cut off before its first commit.
            let cluster = new_cluster()?;
            store.create(cluster)?;
            (store, cluster)
        } else {
            if let Some(why) = store.check().map_err(damaged)? {
                return Err(refused(&db_path, why, RESTORE));
            }
            let cluster = store
                .cluster()
                .map_err(damaged)?
                .ok_or_else(|| refused(&db_path, "the database names no cluster", RESTORE))?;
            if known.is_some_and(|id| id != cluster) {
                return Err(refused(
                    &db_path,
                    format!("the database belongs to cluster {cluster}, the file {CLUSTER_ID} says another"),
                    RESTORE,
                ));
            }
            (store, cluster)
        }
    } else if let Some(id) = known {
        return Err(refused(
            dir,
            format!("it belongs to cluster {id}, but its database {DATABASE} is missing"),
            RESTORE,
        ));
    } else {
        let db = Connection::open(&db_path).map_err(|error| refused(&db_path, error, RIGHTS))?;
        let mut store = Sqlite::tune(db)?;
        let cluster = new_cluster()?;
        store.create(cluster)?;
        (store, cluster)
    };
    if known.is_none() {
        write_id(dir, &id_path, cluster).map_err(|error| refused(&id_path, error, RIGHTS))?;
    }
    let stored = store.load().map_err(damaged)?;
    let epoch = store.next_epoch()?;
    let writer = Writer::start(store).map_err(|error| Error::Internal(error.to_string()))?;
    Ok(Opened {
        cluster,
        epoch,
        jobs: stored.jobs,
        drained: stored.drained,
        readings: stored.readings,
        lessons: stored.lessons,
        pushes: stored.pushes,
        writer,
        lock,
    })
}

fn new_cluster() -> Result<ClusterId, Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::Internal(error.to_string()))?;
    Ok(ClusterId::from_random(bytes))
}

fn read_id(path: &PathBuf) -> Result<Option<ClusterId>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => text
            .trim()
            .parse()
            .map(Some)
            .map_err(|error| refused(path, error, RESTORE)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(refused(path, error, RIGHTS)),
    }
}

fn write_id(dir: &Path, path: &Path, cluster: ClusterId) -> io::Result<()> {
    let partial = path.with_extension("new");
    let mut file = File::create(&partial)?;
    writeln!(file, "{cluster}")?;
    file.sync_all()?;
    fs::rename(&partial, path)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(dir: &Path) -> String {
        let Err(error) = open(dir) else {
            panic!("was opened")
        };
        assert_eq!(error.exit_code(), 78);
        error.to_string()
    }

    #[test]
    fn each_start_has_a_higher_epoch_and_the_same_cluster() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/deep");
        let first = open(&path).unwrap();
        let (cluster, epoch) = (first.cluster, first.epoch);
        assert!(why(&path).contains("another coordinator"));
        drop(first);
        let second = open(&path).unwrap();
        assert_eq!(second.cluster, cluster);
        assert_eq!(second.epoch, epoch.next());
    }

    #[test]
    fn a_directory_that_lost_its_database_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()).unwrap());
        for file in [DATABASE, "stage.db-wal", "stage.db-shm"] {
            let _ = fs::remove_file(dir.path().join(file));
        }
        assert!(why(dir.path()).contains("missing"));
        assert!(!dir.path().join(DATABASE).exists());
    }

    #[test]
    fn a_damaged_or_foreign_database_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()).unwrap());
        let db = dir.path().join(DATABASE);
        let mut bytes = fs::read(&db).unwrap();
        // The header stays whole: only quick_check sees this.
        let len = bytes.len();
        bytes[len / 2..].fill(0xa5);
        fs::write(&db, &bytes).unwrap();
        assert!(why(dir.path()).contains("damaged"));
        assert_eq!(fs::read(&db).unwrap().len(), len);

        fs::write(
            &db,
            b"not a database, but long enough to be read as one, if one is careless",
        )
        .unwrap();
        assert!(why(dir.path()).contains("damaged"));

        fs::remove_file(&db).unwrap();
        Connection::open(&db)
            .unwrap()
            .execute_batch("CREATE TABLE recipes (name TEXT)")
            .unwrap();
        assert!(why(dir.path()).contains("not one of stage's"));
    }

    #[test]
    fn a_database_of_another_cluster_is_refused() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        drop(open(a.path()).unwrap());
        drop(open(b.path()).unwrap());
        fs::copy(b.path().join(CLUSTER_ID), a.path().join(CLUSTER_ID)).unwrap();
        assert!(why(a.path()).contains("belongs to cluster"));
    }

    #[test]
    fn a_first_start_that_was_cut_off_is_still_one() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(DATABASE), b"").unwrap();
        drop(open(dir.path()).unwrap());
        let again = tempfile::tempdir().unwrap();
        drop(open(again.path()).unwrap());
        fs::remove_file(again.path().join(CLUSTER_ID)).unwrap();
        drop(open(again.path()).unwrap());
        assert!(again.path().join(CLUSTER_ID).exists());
    }
}
