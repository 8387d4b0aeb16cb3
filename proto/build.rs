//! Generates the messages and services from `stage/v1/*.proto` with protox: no protoc has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "stage/v1/common.proto",
        "stage/v1/operator.proto",
        "stage/v1/fleet.proto",
    ];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
