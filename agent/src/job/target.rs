//! The job as a target: prepared, receiving, published or not.

use std::sync::Arc;

use stage_core::assignment::{Final, Outcome, Prepared, Run, TargetSpec};
use stage_core::digest::ChunkHash;
use stage_core::failure::{Code, Failure};
use stage_core::id::PlanVersion;
use stage_core::payload::Payload;
use stage_transfer::inbound::{HopEvent, Inbound, InboundConfig};
use stage_transfer::target::{Preparation, PublishError, Target, prepare, was_removed};

use super::Job;
use crate::blocking;

impl Job {
    pub(super) async fn prepare_target(
        &mut self,
        version: PlanVersion,
        spec: TargetSpec,
        payload: Payload,
        hash: ChunkHash,
    ) {
        if self.ended || self.payload.as_ref().is_some_and(|of| *of != payload) {
            // Unfit or failed before, asked again, or a retry of a source that is another by now: begins anew with what
            // is on disk.
            self.halt_target().await;
            self.live.parts().store = None;
            self.target = None;
            self.ended = false;
            self.complete = false;
            self.context.outbox.retract_outcome(self.id);
        }
        // The order to run brings it, and it may be another.
        self.fin = None;
        self.payload = Some(payload.clone());
        let prepared = match &self.target {
            Some(target) => ready(target),
            None => match self.open_target(spec, payload, hash).await {
                Ok(Preparation::Ready(target)) => {
                    let target = Arc::new(target);
                    let prepared = ready(&target);
                    self.target = Some(target);
                    prepared
                }
                Ok(Preparation::Skipped { path }) => Prepared::Skipped { path },
                Err(failure) => Prepared::Unfit(failure),
            },
        };
        self.context.outbox.prepared(self.id, version, false, &prepared);
    }

    async fn open_target(
        &self,
        spec: TargetSpec,
        payload: Payload,
        hash: ChunkHash,
    ) -> Result<Preparation, Failure> {
        let (context, job) = (self.context.clone(), self.id);
        blocking(move || {
            prepare(
                &context.roots,
                &context.state,
                job,
                &spec,
                &payload,
                hash,
                &context.budget,
            )
            .map_err(|failure| failure.on(&context.node))
        })
        .await
    }

    pub(super) async fn be_target(&mut self, run: &Run, spec: &TargetSpec) {
        if self.ended {
            return;
        }
        if self.target.is_none() {
            if was_removed(&self.context.state, self.id) {
                // It was published, and the coordinator knows; who removed it wants it gone.
                tracing::info!("its copy here was removed, and does not come again");
                self.ended = true;
                return;
            }
            // An agent that came back in mid-job: the journal says what is here.
            match self
                .open_target(spec.clone(), run.payload.clone(), run.hash)
                .await
            {
                Ok(Preparation::Ready(target)) => self.target = Some(Arc::new(target)),
                Ok(Preparation::Skipped { path }) => {
                    let prepared = Prepared::Skipped { path };
                    self.context
                        .outbox
                        .prepared(self.id, self.rank.1, false, &prepared);
                    return;
                }
                Err(failure) => return self.end(Outcome::Unfit(failure)).await,
            }
        }
        let Some(target) = self.target.clone() else { return };
        if let Err(failure) = target.begin() {
            return self.end(Outcome::Failed(failure.on(&self.context.node))).await;
        }
        if self.source.is_none() && self.serving.is_none() {
            let serving = Arc::new(self.context.plane.serve(
                self.id,
                run.key.clone(),
                target.store().clone(),
                run.children.clone(),
                run.limit,
            ));
            self.live.parts().serving = Some(serving.clone());
            self.serving = Some(serving);
        }
        match &self.inbound {
            Some(inbound) => {
                let control = run.congestion_control.clone();
                inbound
                    .set_parents(run.parents.clone(), run.streams, control)
                    .await;
            }
            None => {
                let config = InboundConfig {
                    job: self.id,
                    key: run.key.clone(),
                    store: target.store().clone(),
                    parents: run.parents.clone(),
                    streams: run.streams,
                    control: run.congestion_control.clone(),
                    rank: self.rank,
                    wanted: run.wanted,
                };
                let inbound = Arc::new(Inbound::start(
                    &self.context.plane,
                    config,
                    self.hop_events.0.clone(),
                ));
                let mut parts = self.live.parts();
                parts.store = Some(target.store().clone());
                parts.inbound = Some(inbound.clone());
                drop(parts);
                self.inbound = Some(inbound);
            }
        }
    }

    pub(super) async fn hop_event(&mut self, event: HopEvent) {
        match event {
            HopEvent::Complete => {
                self.complete = true;
                self.publish_if_due().await;
            }
            HopEvent::Moved { from: None, to, .. } => tracing::info!(parent = %to, "receives"),
            HopEvent::Moved {
                from: Some(from),
                to,
                why,
            } => {
                tracing::warn!(%from, %to, why, "goes on with another parent");
                self.context.outbox.moved(self.id, &from, &to, why);
            }
            HopEvent::Stuck(failure) => {
                tracing::warn!(
                    hint = failure.hint,
                    "no parent lets this node in, asking on: {failure}"
                );
            }
            HopEvent::Corrupt { parent, chunk } => {
                tracing::error!(%parent, %chunk, "a chunk came with bytes that do not fit its digest");
                self.context.outbox.corrupt(self.id, &parent, chunk);
            }
            HopEvent::Failed(failure) => {
                let failure = failure.on(&self.context.node);
                self.end(without_copy(failure)).await;
            }
            HopEvent::Unfit(failure) => self.end(Outcome::Unfit(failure.on(&self.context.node))).await,
        }
    }

    pub(super) async fn publish_if_due(&mut self) {
        if self.ended {
            return;
        }
        let (Some(target), Some(fin)) = (self.target.clone(), self.fin.clone()) else {
            return;
        };
        if target.store().is_stream() {
            // Only now it can be told what is missing.
            let (closing, data) = (target.clone(), fin.data);
            if let Err(failure) = blocking(move || closing.store().close(data)).await {
                return self.end(Outcome::Failed(failure.on(&self.context.node))).await;
            }
        }
        if !(self.complete || target.store().is_complete()) {
            return;
        }
        let published = {
            let (target, fin, context) = (target.clone(), fin.clone(), self.context.clone());
            blocking(move || {
                let publication = target.publish(&fin)?;
                // The index is a hint: without an entry the copy is as good.
                if let Err(failure) = target.note(&context.index, &fin) {
                    tracing::warn!("{failure}");
                }
                Ok(publication)
            })
            .await
        };
        match published {
            Ok(publication) => {
                let took = self.begun.map(|begun| begun.elapsed()).unwrap_or_default();
                let bytes_received = self
                    .inbound
                    .as_ref()
                    .map_or(0, |inbound| inbound.counters().bytes_received);
                self.ended = true;
                self.published = true;
                // What it replaced has its time to stay from now on.
                self.context.replaced.notify_one();
                let outcome = Outcome::Published {
                    path: publication.path,
                    already: publication.already,
                    bytes_received,
                    took,
                };
                self.context.outbox.outcome(self.id, &outcome);
            }
            Err(PublishError::RootDiffers) => self.repair(&fin).await,
            Err(PublishError::Unfit(failure)) if failure.code == Code::Exists && target.skips() => {
                drop(target);
                self.begin_anew().await;
            }
            Err(PublishError::Unfit(failure)) => {
                self.end(Outcome::Unfit(failure.on(&self.context.node))).await;
            }
            Err(PublishError::Failed(failure)) => {
                self.end(without_copy(failure.on(&self.context.node))).await;
            }
        }
    }

    /// Something stands at the target that was not there before, and the rule says to leave it: preparing says so.
    async fn begin_anew(&mut self) {
        self.halt_target().await;
        self.live.parts().store = None;
        self.target = None;
        self.complete = false;
        if let Some(run) = self.run.clone()
            && let Some(spec) = &run.target
        {
            self.be_target(&run, spec).await;
        }
    }

    /// Some digest here is not the payload's: learns which from a member whose list FINAL proves, and fetches those
    /// chunks again from someone else.
    async fn repair(&mut self, fin: &Final) {
        let (Some(inbound), Some(run)) = (self.inbound.clone(), &self.run) else {
            return;
        };
        let manifest = run.payload.manifest;
        self.complete = false;
        match inbound.repair(fin, manifest).await {
            Ok(differing) => {
                tracing::error!(
                    chunks = differing.len(),
                    "chunks agreed with their hop but not with FINAL; fetching them again"
                );
            }
            Err(failure) => self.end(Outcome::Failed(failure.on(&self.context.node))).await,
        }
    }

    /// The target ends without a copy: its children move on, and it says why.
    async fn end(&mut self, outcome: Outcome) {
        self.ended = true;
        self.halt_target().await;
        self.context.outbox.outcome(self.id, &outcome);
    }

    pub(super) async fn halt_target(&mut self) {
        if let Some(inbound) = self.inbound.take() {
            inbound.stop().await;
        }
        let mut parts = self.live.parts();
        parts.inbound = None;
        if self.source.is_none() {
            parts.serving = None;
            self.serving = None;
        }
    }
}

/// How a target ends that could not write: room may be made; a broken disk stays broken.
fn without_copy(failure: Failure) -> Outcome {
    match failure.code {
        Code::NoSpace | Code::Quota => Outcome::Unfit(failure),
        _ => Outcome::Failed(failure),
    }
}

fn ready(target: &Target) -> Prepared {
    Prepared::Ready {
        path: target.path(),
        candidate: target.is_candidate(),
    }
}
